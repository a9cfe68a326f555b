-- KEYS: the small states of all limits; then, for each moving window, its log.
-- ARGV: the cost; then what each limit needs, its tag first; then, if it is not the server's, the time.
local call, find, match, format = redis.call, string.find, string.match, string.format
local cost, now = ARGV[1] + 0, ARGV[NOW] and ARGV[NOW] + 0
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local stored = forgive('GET', KEYS[1]) or ''

-- What stands behind each limit's tag, or nothing if it cannot be read; and how much of it all belongs to these limits.
local known, from, last, after = 0
-- each small:
local text$, first$, second$, till$ = nil, 0, 0, 0
from, last = find(stored, ARGV[AT$], 1, true)
if last then
  text$, first$, second$, after = match(stored, '^(%d+),(%d+),(%d+)%]()', last + 1)
  if after then
    till$, first$, second$, known = text$ + 0, first$ + 0, second$ + 0, known + after - from
  end
  if not after or till$ <= now or till$ >= TWO_54 or first$ >= TWO_32 or second$ >= TWO_32 then
    text$, first$, second$, till$ = nil, 0, 0, 0
  end
end
-- each log:
local log$ = nil
from, last = find(stored, ARGV[AT$], 1, true)
log$, after = log_open(now, KEYS[KEY$], stored, last and last + 1, AT$ + 1)
known = known + (after and after - from or 0)
-- done
