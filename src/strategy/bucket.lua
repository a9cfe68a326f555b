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
-- hit in microseconds and Nths, and the largest mark. gcra.rs explains marks. Marks are computed
-- inline, because Lua creates every function in each call.

-- Returns the functions that few hits need. They are created on first use, because Lua creates
-- functions in each call.
local bucket_rare

-- Returns the state after the hit, and the debt before it.
local function bucket_hit(now, cost, till, early, mark, amount, full, full_part, span, span_part, largest)
  local before, anchor = 0
  if till <= now then
    early, anchor = 0, now % 32749
  elseif mark > largest then
    before, early, anchor = bucket_rare().owed(now, till, early, mark, amount, full, largest)
  else
    before, anchor = till - now, mark % 32768
    if early >= amount then
      early = 0
    end
  end
  local after = before + span
  if early >= span_part then
    early = early - span_part
  else
    after, early = after + 1, early + (amount - span_part)
  end
  local over = after - full
  if over < 1 or (over == 1 and early + full_part >= amount) then
    local scale = largest - largest % 67108864
    local step = 2 ^ (scale / 67108864)
    return now + after, early, scale + (after - after % step) / step * 65536 + anchor, before
  end
  -- The hit is refused. The last value is true if the clock has gone back, so that the debt alone
  -- exceeds the bucket.
  return nil, nil, nil, nil, over > after - before
end

local function bucket_refuse(now, till, early, mark, amount, full, full_part, span, span_part, largest)
  return bucket_rare().refuse(now, till, early, mark, amount, full, full_part, largest)
end

local rare = false
function bucket_rare()
  if rare then
    return rare
  end

  -- Returns the size of a bucket that refills in `full` microseconds, as in the mark of an
  -- overdraft.
  local function full_bits(full)
    local _, bits = math.frexp(full + 16)
    return (bits - 5) * 16 + math.floor(math.ldexp(full + 16, 5 - bits)) - 16
  end

  -- Returns an upper bound of the refill time of the bucket with these bits.
  local function full_size(bits)
    return math.ldexp(bits % 16 + 17, math.min(math.floor(bits / 16), 48)) - 16
  end

  -- Returns the bound number `n` of an overdraft.
  local function bound(size, n)
    if n % 2 == 1 then
      size = size + math.floor(size / 2)
    end
    return math.ldexp(size, math.floor(n / 2))
  end

  -- Returns a number that identifies the amount of the quota, as gcra.rs does.
  local function fingerprint(amount)
    return amount * 48271 % 2147483647 % math.floor(4294967296 / amount)
  end

  -- Returns the rest of an overdraft and its Nths, as gcra.rs does. The third value is true if the
  -- debt exceeded its bound, because the clock has gone back.
  local function overdraft(micros, early, mark, amount, full)
    local bits, n = math.floor(mark / 1048576) % 1024, math.floor(mark / 32768) % 32
    local size = full_size(bits)
    local most = n < 31 and bound(size, n) or math.huge
    local larger = most
    if math.floor(early / amount) == fingerprint(amount) then
      early = early % amount
      local own = full_bits(full)
      if bits == own then
        larger = 0
      elseif bits > own then
        larger = size
      end
    else
      early = 0
    end
    return math.min(micros, most) - math.max(larger - full, 0), early, micros > most
  end

  -- Returns the debt now: microseconds, Nths to subtract, the anchor, and true if it is an
  -- overdraft from before the clock went back, or false if it is another overdraft.
  local function owed(now, till, early, mark, amount, full, largest)
    if till <= now then
      return 0, 0, now % 32749
    end
    local micros = till - now
    local ahead
    if mark >= 3221225472 then
      micros, early, ahead = overdraft(micros, early, mark, amount, full)
    else
      early = early < amount and early or 0
      if mark > largest then
        -- The mark is from another quota. Drops the part of the debt that exceeds this bucket.
        local steps, scale = mark / 65536 % 1024, mark / 67108864
        local size = math.ldexp(steps - steps % 1 + 1, scale - scale % 1)
        micros = micros - math.max(size - full, 0)
      end
    end
    if micros <= 0 then
      return 0, 0, now % 32749
    end
    return micros, early, mark % 32768, ahead
  end

  -- Returns the state of a debt, which may exceed the bucket.
  local function state(now, micros, early, anchor, amount, full, full_part, largest)
    local over = micros - full
    if over > 1 or over == 1 and early + full_part < amount then
      local bits, n = full_bits(full), 0
      local size = full_size(bits)
      while n < 31 and micros > bound(size, n) do
        n = n + 1
      end
      return now + micros, early + amount * fingerprint(amount), 3221225472 + bits * 1048576 + n * 32768 + anchor
    end
    local scale = largest - largest % 67108864
    local step = 2 ^ (scale / 67108864)
    return now + micros, early, scale + (micros - micros % step) / step * 65536 + anchor
  end

  -- Reduces the debt to that of an empty bucket, if it is larger because the clock has gone back.
  -- An overdraft is reduced to its upper bound.
  local function refuse(now, till, early, mark, amount, full, full_part, largest)
    local micros, rest, anchor, ahead = owed(now, till, early, mark, amount, full, largest)
    if not ahead then
      local scale = largest - largest % 67108864
      local most = (largest % 67108864 + 1) / 65536 * 2 ^ (scale / 67108864)
      if ahead == false or micros < most then
        return
      end
      micros, rest = full, 0
      if full_part > 0 then
        micros, rest = full + 1, amount - full_part
      end
    end
    return state(now, micros, rest, anchor, amount, full, full_part, largest)
  end

  rare = { owed = owed, state = state, refuse = refuse }
  return rare
end

-- Only for settling.

-- Returns the debt of a state at this time, its anchor, and the function that creates a state.
local function bucket_debt(now, till, early, mark, amount, full, full_part, largest)
  local rare = bucket_rare()
  local settled, rest, other = rare.refuse(now, till, early, mark, amount, full, full_part, largest)
  if settled then
    till, early, mark = settled, rest, other
  end
  local micros, parts, anchor = rare.owed(now, till, early, mark, amount, full, largest)
  return micros, parts, anchor, rare.state
end

local function bucket_charge(now, cost, till, early, mark, amount, full, full_part, span, span_part, largest)
  local micros, parts, anchor, state = bucket_debt(now, till, early, mark, amount, full, full_part, largest)
  micros, parts = micros + span, parts - span_part
  if parts < 0 then
    micros, parts = micros + 1, parts + amount
  end
  -- The largest debt is 2^52 microseconds.
  if micros > 4503599627370496 then
    micros, parts = 4503599627370496, 0
  end
  return state(now, micros, parts, anchor, amount, full, full_part, largest)
end

local function bucket_refund(now, cost, till, early, mark, hit, amount, full, full_part, span, span_part, largest)
  local micros, parts, anchor, state = bucket_debt(now, till, early, mark, amount, full, full_part, largest)
  if anchor ~= hit.anchor % 32768 then return end
  -- Refunds the part of the hit that has not been refilled yet. Earlier hits are refilled first.
  local unpaid = math.max(hit.till - now, 0)
  if span >= unpaid then
    span, span_part = unpaid, 0
  end
  micros, parts = micros - span, parts + span_part
  if parts >= amount then
    micros, parts = micros - 1, parts - amount
  end
  if micros <= 0 then
    return 0, 0, 0
  end
  return state(now, micros, parts, anchor, amount, full, full_part, largest)
end
