-- The script of CalendarWindow. Arguments: the amount, an upper bound of the duration of a window,
-- and four instants by the calendar: the start of the previous window, and the ends of the previous,
-- the current and the next one. Times are in microseconds.
--
-- The process has found the instants by its own clock. The clock of the server chooses among them.

-- Returns the end of the window that contains `now`.
local function calendar_end(now, start, previous, current, following)
  if now >= following or now < start then
    error('not prepared for ' .. string.format('%.0f', now))
  end
  return now < previous and previous or now < current and current or following
end

function calendar_hit(now, cost, till, count, anchor, amount, longest, ...)
  local ahead = till - now > longest
  if count == 0 or till <= now then
    till, count, anchor, ahead = calendar_end(now, ...), 0, now % 4294967296, false
  elseif ahead then
    till = calendar_end(now, ...)
  end
  if count + cost <= amount then
    return till, count + cost, anchor, 0, ahead
  end
  return nil, nil, nil, nil, ahead
end

-- Shortens a window that is longer than a window can be, because the clock has gone back.
function calendar_refuse(now, till, count, anchor, amount, longest, ...)
  if count > 0 and till - now > longest then
    return calendar_end(now, ...), count, anchor
  end
end

-- Only for settling.

function calendar_charge(...)
  return window_charge(calendar_hit, ...)
end

function calendar_refund(now, cost, till, count, anchor, hit, ...)
  till = calendar_refuse(now, till, count, anchor, ...) or till
  if till == hit.till then
    return window_refund(cost, till, count, anchor, hit)
  end
end
