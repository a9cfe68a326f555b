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
-- hit in microseconds and Nths, and the largest mark. mark.rs explains marks. Marks are computed
-- inline, because Lua creates every function in each call.

-- Returns the functions that few hits need. They are created on first use, because Lua creates
-- functions in each call.
local bucket_rare

-- Returns the state after the hit, and the debt before it.
local function bucket_hit(now, cost, till, early, mark, amount, full, full_part, span, span_part, largest)
  local before, anchor, ahead, excess, kept = 0
  if till <= now then
    early, anchor = 0, now % 32749
  elseif mark > largest then
    before, early, anchor, ahead, excess, kept =
      bucket_rare().owed(now, till, early, mark, amount, full, full_part, largest)
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
    if kept then
      till, early, mark =
        bucket_rare().state(now, after, early, anchor, amount, full, full_part, largest, excess, kept)
      return till, early, mark, before
    end
    local scale = largest - largest % 67108864
    local step = 2 ^ (scale / 67108864)
    return now + after, early, scale + (after - after % step) / step * 65536 + anchor, before
  end
  -- The hit is refused. The last value is true if the clock has gone back, so that the debt alone
  -- exceeds the bucket.
  return nil, nil, nil, nil, ahead or over > after - before
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

  -- Returns the size of a mark, which is an upper bound of the debt.
  local function mark_size(mark)
    return math.ldexp(math.floor(mark / 65536) % 1024 + 1, math.floor(mark / 67108864))
  end

  -- Returns the smallest mark that is larger than `largest` and whose size is more than `micros`.
  local function covering(micros, largest, anchor)
    micros = math.min(math.max(micros, mark_size(largest)), 9007199254740991)
    local _, bits = math.frexp(micros)
    local shift = math.max(bits - 10, 0)
    return shift * 67108864 + math.floor(math.ldexp(micros, -shift)) * 65536 + anchor
  end

  -- Returns the mark of an overdraft of a bucket with these bits.
  local function overdrawn(bits, micros, anchor)
    local size, n = full_size(bits), 0
    while n < 31 and micros > bound(size, n) do
      n = n + 1
    end
    return 3221225472 + bits * 1048576 + n * 32768 + anchor
  end

  -- Returns the rest of an overdraft and its Nths, as gcra.rs does. The third value is the part that
  -- counts as paid, and the fourth is true if a later overdraft with this mark has the same part. The
  -- fifth is true if the debt exceeded its bound, because the clock has gone back.
  local function overdraft(micros, early, mark, amount, full)
    local bits, n = math.floor(mark / 1048576) % 1024, math.floor(mark / 32768) % 32
    local size = full_size(bits)
    local most = n < 31 and bound(size, n) or math.huge
    local larger, is_kept = most, false
    if math.floor(early / amount) == fingerprint(amount) then
      early = early % amount
      local own = full_bits(full)
      if bits == own then
        larger = 0
      elseif bits > own then
        larger, is_kept = size, true
      end
    else
      early = 0
    end
    local excess = math.max(larger - full, 0)
    return math.min(micros, most) - excess, early, excess, is_kept, micros > most
  end

  -- Returns true if the debt exceeds the bucket.
  local function exceeds(micros, early, amount, full, full_part)
    local over = micros - full
    return over > 1 or over == 1 and early + full_part < amount
  end

  -- Returns the debt now: microseconds, Nths to subtract, the anchor, and true if it was reduced
  -- because the clock has gone back. The last two values are the excess that only another quota owes,
  -- and the mark to keep if there is an excess.
  local function owed(now, till, early, mark, amount, full, full_part, largest)
    if till <= now then
      return 0, 0, now % 32749, false, 0
    end
    local stored, anchor = till - now, mark % 32768
    local micros, excess, is_kept, ahead = stored, 0, true, false
    if mark >= 3221225472 then
      micros, early, excess, is_kept, ahead = overdraft(stored, early, mark, amount, full)
    else
      early = early < amount and early or 0
      local size = mark_size(mark)
      local most = mark_size(math.max(mark, largest))
      if math.floor(mark / 32768) % 2 == 1 then
        most = 16 * size - 1
      end
      if mark > largest then
        excess = math.max(size - 1 - full, 0)
        micros = stored - excess
      end
      if stored > most and exceeds(micros, early, amount, full, full_part) then
        micros, early, ahead = full, 0, true
        if full_part > 0 then
          micros, early = full + 1, amount - full_part
        end
      end
    end
    if micros <= 0 then
      micros, early = 0, 0
    end
    if excess > 0 then
      if not is_kept or micros == 0 then
        mark = covering((micros > 0 and excess or stored) + full, largest, anchor)
        excess = mark_size(mark) - 1 - full
      end
      return micros, early, anchor, ahead, excess, mark
    end
    return micros, early, anchor, ahead, 0
  end

  -- Returns the state of a debt, which may exceed the bucket.
  local function state(now, micros, early, anchor, amount, full, full_part, largest, excess, kept)
    local is_over = exceeds(micros, early, amount, full, full_part)
    if kept then
      local is_overdrawn = kept >= 3221225472
      if is_over then
        if not is_overdrawn then
          local over = micros - full
          if over >= 15 * mark_size(kept) then
            kept = covering(math.floor(over / 15), largest, anchor)
          end
          kept = kept - kept % 65536 + 32768 + anchor
          excess = mark_size(kept) - 1 - full
        end
        -- The largest debt is 2^52 microseconds.
        local most = math.max(4503599627370496 - excess, full_part > 0 and full + 1 or full)
        if micros > most then
          micros, early = most, 0
        end
      end
      local stored = micros + excess
      if is_overdrawn then
        kept = overdrawn(math.floor(kept / 1048576) % 1024, stored, anchor)
        early = early + amount * fingerprint(amount)
      end
      return now + stored, early, kept
    end
    if is_over then
      return now + micros, early + amount * fingerprint(amount), overdrawn(full_bits(full), micros, anchor)
    end
    local scale = largest - largest % 67108864
    local step = 2 ^ (scale / 67108864)
    return now + micros, early, scale + (micros - micros % step) / step * 65536 + anchor
  end

  -- Reduces the debt to that of an empty bucket, if it is larger because the clock has gone back.
  -- An overdraft is reduced to its upper bound.
  local function refuse(now, till, early, mark, amount, full, full_part, largest)
    local micros, parts, anchor, ahead, excess, kept =
      owed(now, till, early, mark, amount, full, full_part, largest)
    if ahead then
      return state(now, micros, parts, anchor, amount, full, full_part, largest, excess, kept)
    end
  end

  rare = { owed = owed, state = state, refuse = refuse, mark_size = mark_size }
  return rare
end

-- Only for settling.

local function bucket_charge(now, cost, till, early, mark, amount, full, full_part, span, span_part, largest)
  local rare = bucket_rare()
  local micros, parts, anchor, _, excess, kept =
    rare.owed(now, till, early, mark, amount, full, full_part, largest)
  micros, parts = micros + span, parts - span_part
  if parts < 0 then
    micros, parts = micros + 1, parts + amount
  end
  -- The largest debt is 2^52 microseconds.
  if micros > 4503599627370496 then
    micros, parts = 4503599627370496, 0
  end
  return rare.state(now, micros, parts, anchor, amount, full, full_part, largest, excess, kept)
end

local function bucket_refund(now, cost, till, early, mark, hit, amount, full, full_part, span, span_part, largest)
  local rare = bucket_rare()
  local micros, parts, anchor, ahead, excess, kept =
    rare.owed(now, till, early, mark, amount, full, full_part, largest)
  if anchor ~= hit.anchor % 32768 then return end
  -- Refunds the part of the hit that has not been refilled yet. Earlier hits are refilled first. A hit
  -- under the mark of a larger bucket was refilled before the excess.
  local before = 0
  if hit.anchor > largest and hit.anchor < 3221225472 then
    before = math.max(rare.mark_size(hit.anchor) - 1 - full, 0)
    if hit.till - hit.at < before + span then
      before = 0
    end
  end
  local unpaid = math.max(hit.till - before - now, 0)
  if span >= unpaid then
    span, span_part = unpaid, 0
  end
  micros, parts = micros - span, parts + span_part
  if parts >= amount then
    micros, parts = micros - 1, parts - amount
  end
  local is_less = micros < 0 or micros == 0 and parts > 0
  if kept and not ahead and (is_less or kept ~= mark) then
    -- This bucket owes less than the refund, or cannot write the mark.
    till = till - span
    if till > now then
      return till, early, mark
    end
    return 0, 0, 0
  end
  if is_less then
    micros, parts = 0, 0
  end
  if micros == 0 and not kept then
    return 0, 0, 0
  end
  return rare.state(now, micros, parts, anchor, amount, full, full_part, largest, excess, kept)
end
