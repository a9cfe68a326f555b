-- The script of FixedWindow. Arguments: the amount, the period in microseconds, and 1 if windows
-- are aligned.
--
-- `latest` is the end of a window that begins now.

function fixed_window_hit(now, cost, till, count, anchor, amount, period, aligned)
  local latest, ahead = now + period
  if aligned == 1 then
    latest = latest - now % period
  end
  if count == 0 or till <= now then
    till, count, anchor = latest, 0, now % 4294967296
  elseif till > latest then
    till, ahead = latest, true
  end
  if count + cost <= amount then
    return till, count + cost, anchor, 0, ahead
  end
  return nil, nil, nil, nil, ahead
end

-- Shortens a window that ends later than a new window would, because the clock has gone back.
function fixed_window_refuse(now, till, count, anchor, amount, period, aligned)
  local latest = aligned == 1 and now - now % period + period or now + period
  if count > 0 and till > latest then
    return latest, count, anchor
  end
end

-- Only for settling.

function fixed_window_charge(now, cost, till, count, anchor, amount, period, aligned)
  local latest = aligned == 1 and now - now % period + period or now + period
  if count == 0 or till <= now then
    till, count, anchor = latest, 0, now % 4294967296
  end
  return math.min(till, latest), math.min(count + cost, 4294967295), anchor
end

function fixed_window_refund(now, cost, till, count, anchor, hit, amount, period, aligned)
  local latest = aligned == 1 and now - now % period + period or now + period
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
