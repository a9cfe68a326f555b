-- The script of SlidingWindowCounter. Arguments: the amount, the period in microseconds, and 1 if
-- buckets are aligned.

-- Returns true if a * b < c * d. The result is exact for a and c up to 2^32, and b and d up to
-- 2^52. Doubles are exact up to 2^53, so larger products are compared in three parts.
local function is_less(a, b, c, d)
  local x, y = a * b, c * d
  if x < 9007199254740992 and y < 9007199254740992 then
    return x < y
  end
  local piece = 67108864
  local function pieces(m, n)
    local m0, n0 = m % piece, n % piece
    local m1, n1 = (m - m0) / piece, (n - n0) / piece
    local low = m0 * n0
    local low0 = low % piece
    local middle = m0 * n1 + m1 * n0 + (low - low0) / piece
    local middle0 = middle % piece
    return m1 * n1 + (middle - middle0) / piece, middle0, low0
  end
  local x2, x1, x0 = pieces(a, b)
  local y2, y1, y0 = pieces(c, d)
  if x2 ~= y2 then return x2 < y2 end
  if x1 ~= y1 then return x1 < y1 end
  return x0 < y0
end

-- Returns the buckets at the current time: the start of the current bucket, the time since its
-- start, and the counts of the previous and of the current bucket.
local function sliding_buckets(now, till, previous, current, period, aligned)
  aligned = aligned == 1
  local floor = aligned and now - now % period or now
  local start = till - 2 * period
  if start < 0 then
    start = 0
  end
  if aligned then
    start = start - start % period
  end
  local latest = aligned and floor + period or now
  if start > now and start > latest then
    start = latest
  end
  local elapsed = now - start
  if elapsed < 0 then
    elapsed = 0
  elseif elapsed >= period then
    start, elapsed, previous, current = start + period, elapsed - period, current, 0
    if elapsed >= period then
      previous = 0
    end
  end
  if previous == 0 and current == 0 then
    return floor, now - floor, 0, 0
  end
  return start, elapsed, previous, current
end

function sliding_window_counter_hit(now, cost, till, previous, current, amount, period, aligned)
  local start, elapsed, before, spent = sliding_buckets(now, till, previous, current, period, aligned)
  local room, ahead = amount - cost - spent, till - 2 * period > now
  -- floor(before * (period - elapsed) / period) <= room
  if room >= 0 and (before <= room or is_less(before, period - elapsed, room + 1, period)) then
    return start + 2 * period, before, spent + cost, 0, ahead
  end
  return nil, nil, nil, nil, ahead
end

-- Moves buckets that begin in the future, because the clock has gone back. Aligned buckets move to
-- the next period at the latest, others to now.
function sliding_window_counter_refuse(now, till, previous, current, amount, period, aligned)
  if till - 2 * period > now and previous + current > 0 then
    local start = sliding_buckets(now, till, previous, current, period, aligned)
    if start + 2 * period ~= till then
      return start + 2 * period, previous, current
    end
  end
end

-- Only for settling.

function sliding_window_counter_charge(now, cost, till, previous, current, amount, period, aligned)
  local start, _, before, spent = sliding_buckets(now, till, previous, current, period, aligned)
  return start + 2 * period, before, math.min(spent + cost, 4294967295)
end

function sliding_window_counter_refund(now, cost, till, previous, current, hit, amount, period, aligned)
  local start, _, before, spent = sliding_buckets(now, till, previous, current, period, aligned)
  if before == 0 and spent == 0 then return end
  if hit.till == start + 2 * period then
    spent = math.max(spent - cost, 0)
  elseif hit.till == start + period then
    before = math.max(before - cost, 0)
  else
    return
  end
  if before == 0 and spent == 0 then
    return 0, 0, 0
  end
  return start + 2 * period, before, spent
end
