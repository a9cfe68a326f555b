-- The script of Lockout. Arguments: 1 if refusals are strikes, the amount, the period, the first lock,
-- the factor, the longest lock, and the time after which the level is forgotten. Times are in
-- microseconds.
--
-- lockout.rs explains the mark: the run in 24 bits, the level in 6, and the bits for a refusal that
-- followed and for a lock.

local function lockout_length(level, first, factor, longest)
  for _ = 1, factor > 1 and level or 0 do
    first = first * factor
    if first >= longest then
      return longest
    end
  end
  return first
end

-- Returns the duration of a window or lock, the time for which its level is remembered, and the level
-- after it.
local function lockout_spans(level, locked, period, first, factor, longest, forget)
  local span = period
  if locked then
    span = lockout_length(level, first, factor, longest)
    if span < longest and level < 63 then
      level = level + 1
    end
  end
  return span, level > 0 and forget or 0, level
end

-- Returns the start, the strikes, the level, the run, true for a lock, true if the start was ahead of
-- the clock, and true if the window or lock is live.
local function lockout_at(now, till, strikes, mark, amount, period, first, factor, longest, forget)
  if till <= now then
    return now, 0, 0, now % 16777213, false, false, false
  end
  local run = mark % 16777216
  local level = (mark - run) / 16777216
  local locked = level >= 128
  level = level % 64
  local span, kept, after = lockout_spans(level, locked, period, first, factor, longest, forget)
  local start = till - span - kept
  local ahead = start > now
  if ahead then
    start = now
  end
  if now - start < span then
    return start, strikes, level, run, locked, ahead, true
  end
  return now, 0, after, now % 16777213, false, false, false
end

-- Returns the state of a window or lock.
local function lockout_state(start, strikes, level, run, locked, flags, period, first, factor, longest, forget)
  local span, kept = lockout_spans(level, locked, period, first, factor, longest, forget)
  return start + span + kept, strikes, (locked and 2147483648 or 0) + flags + level * 16777216 + run
end

-- Returns the state after more strikes, which may start a lock.
local function lockout_strike(now, count, start, strikes, level, run, amount, ...)
  strikes = math.min(strikes + count, 4294967295)
  if strikes >= amount then
    start = now
  end
  return lockout_state(start, strikes, level, run, strikes >= amount, 0, ...)
end

function lockout_hit(now, cost, till, strikes, mark, refusals, amount, period, ...)
  -- The window without a level that most hits find.
  if refusals == 0 and mark < 16777216 and till > now and till - period <= now and strikes + cost < amount then
    return till, strikes + cost, mark
  end
  local start, count, level, run, locked, ahead = lockout_at(now, till, strikes, mark, amount, period, ...)
  if locked or refusals == 0 and count + cost > amount then
    return nil, nil, nil, nil, ahead
  elseif refusals == 1 then
    return till, strikes, mark
  end
  return lockout_strike(now, cost, start, count, level, run, amount, period, ...)
end

-- Adds a strike if refusals count. A lock then gets the bit for a refusal that followed. Stores a
-- start that was ahead of the clock.
function lockout_refuse(now, till, strikes, mark, refusals, amount, ...)
  local start, count, level, run, locked, ahead = lockout_at(now, till, strikes, mark, amount, ...)
  if refusals == 1 and not locked then
    return lockout_strike(now, 1, start, count, level, run, amount, ...)
  end
  local flags = refusals * 1073741824
  if ahead or mark % 2147483648 < flags then
    return lockout_state(start, count, level, run, locked, flags, ...)
  end
end

-- Only for settling.

function lockout_charge(now, cost, till, strikes, mark, refusals, amount, ...)
  local start, count, level, run, locked = lockout_at(now, till, strikes, mark, amount, ...)
  if locked or refusals == 1 then
    return till, strikes, mark
  end
  return lockout_strike(now, cost, start, count, level, run, amount, ...)
end

function lockout_refund(now, cost, till, strikes, mark, hit, refusals, amount, ...)
  local start, count, level, run, locked, _, live = lockout_at(now, till, strikes, mark, amount, ...)
  local anchor = math.floor(hit.anchor / 16777216)
  local _, kept = lockout_spans(anchor % 64, anchor >= 128, ...)
  if refusals == 1 or not live or run ~= hit.anchor % 16777216 or now >= hit.till - kept then
    return
  end
  count = math.max(count - cost, 0)
  if count == 0 and level == 0 then
    return 0, 0, 0
  end
  return lockout_state(start, count, level, run, locked and count >= amount, 0, ...)
end
