-- What TokenBucket and LeakyBucket have in common: how long until all is paid back, in microseconds and by how many Nths of
-- one that is too long. Adding and comparing only: what has to be multiplied and divided was so before.
-- Arguments: amount (N), the span in which all of the capacity comes back, in microseconds and Nths of one, and the same for
-- what the hit costs.

local function owed(now, till, early, anchor, at)
  if till <= now then
    return 0, 0, now % 4294967296
  end
  return till - now, early < tonumber(ARGV[at]) and early or 0, anchor
end

local function bucket_hit(now, till, early, anchor, at)
  local before, anchor = 0, anchor
  before, early, anchor = owed(now, till, early, anchor, at)
  local after, part = before + ARGV[at + 3], tonumber(ARGV[at + 4])
  if early >= part then
    early = early - part
  else
    after, early = after + 1, early + (ARGV[at] - part)
  end
  local over = after - ARGV[at + 1]
  if over < 1 or (over == 1 and early + ARGV[at + 2] >= tonumber(ARGV[at])) then
    return now + after, early, anchor, before
  end
end

-- Only for refunds.

local function bucket_refund(now, till, early, anchor, at, hit)
  if anchor ~= hit.anchor then return end
  local amount = tonumber(ARGV[at])
  local micros
  micros, early = owed(now, till, early, anchor, at)
  -- It can owe no more than the full bucket does, whatever a clock that has gone back makes of it.
  local full, full_part = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local full_early = 0
  if full_part > 0 then
    full, full_early = full + 1, amount - full_part
  end
  if micros > full or (micros == full and early < full_early) then
    micros, early = full, full_early
  end
  -- What has not been paid back of the hit, first come, first paid.
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
  return now + micros, early, anchor
end
