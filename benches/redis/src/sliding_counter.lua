-- A minimal sliding window counter with the server's time. ARGV: amount, period in microseconds.
local time = redis.call('TIME')
local now, period = time[1] * 1000000 + time[2], tonumber(ARGV[2])
local number = math.floor(now / period)
local counts = redis.call('HMGET', KEYS[1], number - 1, number)
local before, current = tonumber(counts[1] or 0), tonumber(counts[2] or 0)
local estimate = math.floor(before * (period - now % period) / period) + current
if estimate >= tonumber(ARGV[1]) then
  return { 0, estimate }
end
redis.call('HINCRBY', KEYS[1], number, 1)
redis.call('PEXPIRE', KEYS[1], math.ceil(2 * period / 1000))
return { 1, estimate + 1 }
