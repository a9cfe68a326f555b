-- Runs a command on a key. Returns nothing if the key has the wrong type, so that it counts as
-- missing: every version of the format stores strings, so the key belongs to another program. Every
-- other error ends the script. For that, redis.call runs the failed command again, because errors of
-- redis.pcall have lost their code on some versions.
local function forgive(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' then
    return reply
  end
  if not string.find(reply.err, '^%-?WRONGTYPE') then
    return redis.call(...)
  end
end
