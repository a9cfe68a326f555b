-- Reads the states. record.rs describes their format.
--
-- STATES is the key of the small states, and PACKED the packed arguments.
-- arguments

-- As forgive.lua, but without a function, because Lua creates functions in each call.
local stored = redis.pcall('GET', STATES) or ''
if type(stored) == 'table' then
  if not string.find(stored.err, '^%-?WRONGTYPE') then
    call('GET', STATES)
  end
  stored = ''
end

-- The records of these limits are usually the first ones, in the order of the limits. Otherwise they
-- are searched for. `others` is true if there may be records of other limits.
local others = #stored > SIZE
-- variables
if #stored >= SIZE then
  -- unpack
end
if not (
  -- each:
  digest$ == DIGEST$ and
  -- done
  true) then
  others = #stored > 0
  -- each small:
  digest$, till$, first$, second$ = -1, 0, 0, 0
  -- each log:
  digest$, till$, units$, oldest$, first$, length$, room$, head$, tail$ = -1, 0, 0, 0, 0, 0, 0, 0, 0
  -- done
end
-- A value that does not consist of records has another format.
if others then
  local at, is_known, after, found, ends = 1, true
  while is_known and at + 19 <= #stored do
    found, ends = unpack('>I4I8', stored, at)
    after, is_known = at + (found < 2147483648 and 20 or 44), ends < TWO_54
    -- each:
    is_known = is_known or found == DIGEST$
    -- each small:
    if found == DIGEST$ and digest$ ~= found then
      digest$, till$, first$, second$ = unpack('>I4I8I4I4', stored, at)
    end
    -- each log:
    if found == DIGEST$ and digest$ ~= found and after <= #stored + 1 then
      digest$, till$, units$, oldest$, first$, length$, room$, head$, tail$ =
        unpack('>I4I8I4I8I4I4I4I4I4', stored, at)
    end
    -- done
    at = after
  end
  if not is_known or at ~= #stored + 1 then
    -- unknown
  end
end
-- The end of the last state, from which the expiry of the key follows.
local last = 0
-- each small:
if till$ <= now or till$ >= TWO_54 then
  till$, first$, second$ = 0, 0, 0
end
-- each:
if till$ > last then
  last = till$
end
-- each log:
local log$ = log_open(now, STATES, KEYS[KEY$], stored, till$, units$, oldest$, first$, length$, room$, head$, tail$, ARGUMENTS$)
-- done
