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

function fixed_window_charge(...)
  return window_charge(fixed_window_hit, ...)
end

function fixed_window_refund(now, cost, till, count, anchor, hit, ...)
  till = fixed_window_refuse(now, till, count, anchor, ...) or till
  if till == hit.till then
    return window_refund(cost, till, count, anchor, hit)
  end
end
