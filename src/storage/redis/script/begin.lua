-- Reads the clock. OWN is the time of a test's clock.
local call, pack, unpack = redis.call, struct.pack, struct.unpack
local now = OWN and OWN + 0
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
