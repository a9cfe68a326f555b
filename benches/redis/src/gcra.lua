-- A minimal GCRA with the server's time. ARGV: microseconds per hit, microseconds of the full burst.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local till = tonumber(redis.call('GET', KEYS[1]) or 0)
if till < now then
  till = now
end
till = till + ARGV[1]
if till - now > tonumber(ARGV[2]) then
  return { 0, till - now }
end
redis.call('SET', KEYS[1], string.format('%.0f', till), 'PX', math.ceil((till - now) / 1000))
return { 1, till - now }
