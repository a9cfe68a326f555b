-- Runs a command on a key. Returns nothing if the key has the wrong type, so that it counts as
-- missing: every version of the format stores strings, so the key belongs to another program. Every other error ends the script. The failed command is run again by redis.call for
-- that, because only redis.call preserves the error code on all versions.
local function forgive(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' then
    return reply
  end
  if not string.find(reply.err, '^%-?WRONGTYPE') then
    return redis.call(...)
  end
end
