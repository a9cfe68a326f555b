-- A minimal fixed window with the server's time. ARGV: amount, period in milliseconds.
local time = redis.call('TIME')
local count = redis.call('INCR', KEYS[1])
local left
if count == 1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  left = tonumber(ARGV[2])
else
  left = redis.call('PTTL', KEYS[1])
end
return { count <= tonumber(ARGV[1]) and 1 or 0, count, left, time[1] }
