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

-- Returns the size of the full bucket with this largest mark, as the mark of an overdraft has it,
-- and an upper bound of its microseconds.
local function full_size(largest)
  local steps, scale = math.floor(largest / 65536) % 1024, math.floor(largest / 67108864)
  while steps >= 32 do
    steps, scale = math.floor(steps / 2), scale + 1
  end
  return scale * 32 + steps, math.ldexp(steps + 1, scale)
end

-- Returns an overdrawn debt without what it cannot have been, or what the bucket of another quota
-- held in addition. The second value is true if the clock has gone back.
local function overdraft(micros, mark, at, largest)
  local bits, doublings = math.floor(mark / 524288) % 2048, math.floor(mark / 32768) % 16
  local size = math.ldexp(bits % 32 + 1, math.min(math.floor(bits / 32), 52))
  local most = doublings < 15 and math.ldexp(size, doublings) or math.huge
  local excess = bits == full_size(largest) and 0 or math.max(size - ARGV[at + 1], 0)
  return math.min(micros, most) - excess, micros > most
end

-- Returns the debt now: microseconds, Nths to subtract, the anchor, and true if it is an overdraft
-- from before the clock went back, or false if it is another overdraft.
local function owed(now, till, early, mark, at, largest)
  if till <= now then
    return 0, 0, now % 32749
  end
  local micros = till - now
  if mark > largest then
    local ahead
    if mark >= 3221225472 then
      micros, ahead = overdraft(micros, mark, at, largest)
    else
      -- The mark is from another quota. Drops the part of the debt that exceeds this bucket.
      local steps, scale = mark / 65536 % 1024, mark / 67108864
      local size = math.ldexp(steps - steps % 1 + 1, scale - scale % 1)
      micros = micros - math.max(size - ARGV[at + 1], 0)
    end
    if micros <= 0 then
      return 0, 0, now % 32749
    end
    return micros, early > 0 and early < tonumber(ARGV[at]) and early or 0, mark % 32768, ahead
  end
  return micros, early > 0 and early < tonumber(ARGV[at]) and early or 0, mark % 32768
end

-- Returns the state of a debt, which may exceed the bucket.
local function bucket_state(now, micros, early, anchor, at, largest)
  local over = micros - ARGV[at + 1]
  if over > 1 or over == 1 and early + ARGV[at + 2] < tonumber(ARGV[at]) then
    local bits, size = full_size(largest)
    local doublings = 0
    while doublings < 15 and micros > math.ldexp(size, doublings) do
      doublings = doublings + 1
    end
    return now + micros, early, 3221225472 + bits * 524288 + doublings * 32768 + anchor
  end
  local scale = largest - largest % 67108864
  local step = 2 ^ (scale / 67108864)
  return now + micros, early, scale + (micros - micros % step) / step * 65536 + anchor
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

-- Reduces the debt to that of an empty bucket, if it is larger because the clock has gone back. An
-- overdraft is reduced to what it can have been.
local function bucket_refuse(now, till, early, mark, at)
  local largest = ARGV[at + 5] + 0
  local scale = largest - largest % 67108864
  local step = 2 ^ (scale / 67108864)
  local micros, rest, anchor, ahead = owed(now, till, early, mark, at, largest)
  if ahead then
    return bucket_state(now, micros, rest, anchor, at, largest)
  end
  if ahead == nil and micros >= (largest % 67108864 + 1) / 65536 * step then
    local full, part = ARGV[at + 1] + 0, ARGV[at + 2] + 0
    early = 0
    if part > 0 then
      full, early = full + 1, ARGV[at] - part
    end
    return now + full, early, scale + (full - full % step) / step * 65536 + anchor
  end
end

-- Only for settling.

local function bucket_charge(now, cost, till, early, mark, at)
  local amount, largest = tonumber(ARGV[at]), ARGV[at + 5] + 0
  local settled, rest, other = bucket_refuse(now, till, early, mark, at)
  if settled then
    till, early, mark = settled, rest, other
  end
  local micros, anchor
  micros, early, anchor = owed(now, till, early, mark, at, largest)
  micros, early = micros + ARGV[at + 3], early - ARGV[at + 4]
  if early < 0 then
    micros, early = micros + 1, early + amount
  end
  -- The largest debt is 2^52 microseconds.
  if micros > 4503599627370496 then
    micros, early = 4503599627370496, 0
  end
  return bucket_state(now, micros, early, anchor, at, largest)
end

local function bucket_refund(now, till, early, mark, at, hit)
  local amount, largest = tonumber(ARGV[at]), ARGV[at + 5] + 0
  local settled, rest, other = bucket_refuse(now, till, early, mark, at)
  if settled then
    till, early, mark = settled, rest, other
  end
  local micros, anchor
  micros, early, anchor = owed(now, till, early, mark, at, largest)
  if anchor ~= hit.anchor % 32768 then return end
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
  return bucket_state(now, micros, early, anchor, at, largest)
end
