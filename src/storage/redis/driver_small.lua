-- Decides on a policy without moving windows: what driver.lua does, written out for each limit and without tables.
--
-- Lines with a $ stand once for each limit, neighbours together, with the limit's number for $, the first of its STRIDE words
-- for AT$, and for NAME$ what its functions are called by.
--
-- KEYS: the states. ARGV: hit or peek; the time (empty: the server's); the cost; then for each limit its tag and five
-- arguments of its strategy. Answers what driver.lua does.

local cost, now = ARGV[3] + 0, tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local stored = redis.pcall('GET', KEYS[1])
if type(stored) ~= 'string' then
  stored = ''
end

-- What each limit remembers: written by the same strategy at the same place, else nothing.
local position, tag, rest = 1
local till$, first$, second$
tag, rest = ARGV[AT$], nil
if string.sub(stored, position, position + #tag - 1) == tag then -- $
  till$, first$, second$, rest = string.match(stored, '^:(%d+),(%d+),(%d+);?()', position + #tag)
end -- $
if rest then -- $
  till$, first$, second$ = till$ + 0, first$ + 0, second$ + 0
  position = rest -- $
else -- $
  local _, last = string.find(stored, '^[^;]*;?', position) -- $
  till$, position = 0, last + 1
end -- $
if till$ <= now or till$ >= 9007199254740992 or first$ >= TWO_32 or second$ >= TWO_32 then
  till$, first$, second$ = 0, 0, 0
end -- $

-- All limits are asked, and spend only when all admit.
local admitted = 1
local new_till$, new_first$, new_second$, delay$
if cost > 0 then -- $
  new_till$, new_first$, new_second$, delay$ = NAME$_hit(now, cost, till$, first$, second$, AT$ + 1)
  if not new_till$ then
    admitted = 0 -- $
  end -- $
end -- $

if cost > 0 and ARGV[1] == 'hit' then
  local changed = admitted == 1
  if changed then
    till$, first$, second$ = new_till$, new_first$, new_second$
  else
    if NAME$_refuse and till$ > now then
      local forgotten, a, b = NAME$_refuse(now, till$, first$, second$, AT$ + 1)
      if forgotten then -- $
        till$, first$, second$, changed = forgotten, a, b, true
      end -- $
    end -- $
  end
  if changed then
    -- An instant in two pieces: see driver.lua.
    local latest, text, piece = now
    piece = '-' -- $
    if till$ > now then
      piece = string.format('%s:%d%08d,%u,%u', ARGV[AT$], till$ / 100000000, till$ % 100000000, first$, second$)
      latest = till$ > latest and till$ or latest
    end -- $
    text = text and text .. ';' .. piece or piece -- $
    if latest > now then
      redis.call('SET', KEYS[1], text, 'PX', math.ceil((latest - now) / 1000) + GRACE)
    else
      redis.call('DEL', KEYS[1])
    end
  end
end

return {
  now, admitted,
  till$, first$, second$, delay$ or 0,
}
