-- The common part of the windows that count units.

-- Only for settling.

-- Charges units by a hit that is always admitted.
local function window_charge(hit, now, cost, till, count, anchor, amount, ...)
  till, count, anchor = hit(now, cost, till, count, anchor, math.huge, ...)
  return till, math.min(count, 4294967295), anchor
end

-- Takes units of a hit from the window with this anchor.
local function window_refund(cost, till, count, anchor, hit)
  if count > 0 and anchor == hit.anchor then
    if count <= cost then
      return 0, 0, 0
    end
    return till, count - cost, anchor
  end
end
