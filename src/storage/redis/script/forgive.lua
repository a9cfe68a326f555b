-- Runs a command on a key that may hold another type than ours: such a key is lost, and there is no reply. Every other error ends the
-- script. The command is run again for that, since only `redis.call` keeps the error's code on every version.
local function forgive(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' then
    return reply
  end
  if not string.find(reply.err, '^%-?WRONGTYPE') then
    return redis.call(...)
  end
end
