-- Runs every command that the scripts use, on a temporary key. The error names the first command
-- that fails.
if not pcall(function() return struct.unpack('>I4I8', struct.pack('>I4I8', 1, 2)) end) then
  return redis.error_reply('ERR the server has no Lua library struct: use Redis 6.2 or later, or Valkey 7.2 or later')
end
local commands = {
  { 'TIME' },
  { 'SET', KEYS[1], '-', 'PX', '1000' },
  { 'SET', KEYS[1], '-', 'KEEPTTL' },
  { 'SETRANGE', KEYS[1], '0', '-' },
  { 'GET', KEYS[1] },
  { 'GETRANGE', KEYS[1], '0', '0' },
  { 'STRLEN', KEYS[1] },
  { 'PEXPIRE', KEYS[1], '1000' },
  { 'UNLINK', KEYS[1] },
}
for _, command in ipairs(commands) do
  local reply = redis.pcall(unpack(command))
  if type(reply) == 'table' and reply.err then
    local code, why = string.match(reply.err, '^%-?(%u+) (.*)$')
    return redis.error_reply(string.format('%s cannot run %s: %s', code or 'ERR', command[1], why or reply.err))
  end
end
return 1
