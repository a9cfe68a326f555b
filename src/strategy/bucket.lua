-- The common part of TokenBucket and LeakyBucket.
--
-- The state of a bucket is a debt: the time until the bucket is full again. `till` is the end of
-- the debt in whole microseconds. The exact end is earlier by `early` Nths of a microsecond, where
-- N is the amount of the quota.
--
-- This script only adds and compares. Products and quotients are computed in Rust, and passed as
-- arguments.
--
-- Arguments: the amount (N), the debt of an empty bucket in microseconds and Nths, the debt of the
-- hit in microseconds and Nths, and the largest mark. mark.rs explains marks. They are computed
-- inline, because Lua creates every function in each call.

-- Returns the debt now: microseconds, Nths to subtract, and the anchor.
local function owed(now, till, early, mark, at, largest)
  if till <= now then
    return 0, 0, now % 32749
  end
  local micros = till - now
  if mark > largest then
    -- The mark is from another quota. Drops the part of the debt that exceeds this bucket.
    local steps, scale = mark / 65536 % 1024, mark / 67108864
    local size = math.ldexp(steps - steps % 1 + 1, scale - scale % 1)
    micros = micros - math.max(size - ARGV[at + 1], 0)
    if micros <= 0 then
      return 0, 0, now % 32749
    end
  end
  return micros, early > 0 and early < tonumber(ARGV[at]) and early or 0, mark % 65536
end

local function bucket_hit(now, till, early, mark, at)
  local before, anchor
  local largest = ARGV[at + 5] + 0
  before, early, anchor = owed(now, till, early, mark, at, largest)
  local after, part = before + ARGV[at + 3], tonumber(ARGV[at + 4])
  if early >= part then
    early = early - part
  else
    after, early = after + 1, early + (ARGV[at] - part)
  end
  local over = after - ARGV[at + 1]
  if over < 1 or (over == 1 and early + ARGV[at + 2] >= tonumber(ARGV[at])) then
    local scale = largest - largest % 67108864
    local step = 2 ^ (scale / 67108864)
    return now + after, early, scale + (after - after % step) / step * 65536 + anchor, before
  end
  -- The hit is refused. The last value is true if the clock has gone back, so that the debt alone
  -- exceeds the bucket.
  return nil, nil, nil, nil, over > after - before
end

-- Reduces the debt to that of an empty bucket, if it is larger because the clock has gone back.
local function bucket_refuse(now, till, early, mark, at)
  local largest = ARGV[at + 5] + 0
  local scale = largest - largest % 67108864
  local step = 2 ^ (scale / 67108864)
  local micros, _, anchor = owed(now, till, early, mark, at, largest)
  if micros >= (largest % 67108864 + 1) / 65536 * step then
    local full, part = ARGV[at + 1] + 0, ARGV[at + 2] + 0
    early = 0
    if part > 0 then
      full, early = full + 1, ARGV[at] - part
    end
    return now + full, early, scale + (full - full % step) / step * 65536 + anchor
  end
end

-- Only for refunds.

local function bucket_refund(now, till, early, mark, at, hit)
  local amount, largest = tonumber(ARGV[at]), ARGV[at + 5] + 0
  local settled, rest, other = bucket_refuse(now, till, early, mark, at)
  if settled then
    till, early, mark = settled, rest, other
  end
  local micros, anchor
  micros, early, anchor = owed(now, till, early, mark, at, largest)
  if anchor ~= hit.anchor % 65536 then return end
  -- Refunds the part of the hit that has not been refilled yet. Earlier hits are refilled first.
  local span, part = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local unpaid = math.max(hit.till - now, 0)
  if span >= unpaid then
    span, part = unpaid, 0
  end
  micros, early = micros - span, early + part
  if early >= amount then
    micros, early = micros - 1, early - amount
  end
  if micros <= 0 then
    return 0, 0, 0
  end
  local scale = largest - largest % 67108864
  local step = 2 ^ (scale / 67108864)
  return now + micros, early, scale + (micros - micros % step) / step * 65536 + anchor
end
