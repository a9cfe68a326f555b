-- Reads the states.
--
-- KEYS: the key of the small states, then for each moving window the key of its log.
-- ARGV: the cost, then for each limit its tag and its arguments. In tests, the time follows.
local call, find, match, format = redis.call, string.find, string.match, string.format
local cost, now = ARGV[1] + 0, ARGV[NOW] and ARGV[NOW] + 0
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local stored = forgive('GET', KEYS[1]) or ''

-- A small state is the text after its limit's tag. A state that cannot be parsed counts as none.
-- `known` is the number of bytes that belong to these limits.
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
