-- The script of FixedWindow. Arguments: the amount, the period in microseconds, and 1 if windows
-- are aligned.

-- Returns the end of a window that begins now.
local function fixed_window_end(now, at)
  local period = ARGV[at + 1]
  if ARGV[at + 2] == '1' then
    return now - now % period + period
  end
  return now + period
end

function fixed_window_hit(now, cost, till, count, anchor, at)
  local latest, ahead = fixed_window_end(now, at)
  if count == 0 or till <= now then
    till, count, anchor = latest, 0, now % 4294967296
  elseif till > latest then
    till, ahead = latest, true
  end
  if count + cost <= tonumber(ARGV[at]) then
    return till, count + cost, anchor, 0, ahead
  end
  return nil, nil, nil, nil, ahead
end

-- Shortens a window that ends later than a new window would, because the clock has gone back.
function fixed_window_refuse(now, till, count, anchor, at)
  local latest = fixed_window_end(now, at)
  if count > 0 and till > latest then
    return latest, count, anchor
  end
end

-- Only for settling.

function fixed_window_charge(now, cost, till, count, anchor, at)
  local latest = fixed_window_end(now, at)
  if count == 0 or till <= now then
    till, count, anchor = latest, 0, now % 4294967296
  end
  return math.min(till, latest), math.min(count + cost, 4294967295), anchor
end

function fixed_window_refund(now, cost, till, count, anchor, at, hit)
  local latest = fixed_window_end(now, at)
  if till > latest then
    till = latest
  end
  if count > 0 and till == hit.till and anchor == hit.anchor then
    if count <= cost then
      return 0, 0, 0
    end
    return till, count - cost, anchor
  end
end
