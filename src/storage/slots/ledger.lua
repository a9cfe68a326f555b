-- Applies a claim to a ledger. ledger.rs describes both.
--
-- The key has the text of the ledger. The arguments are those of the claim: the process, its sequence,
-- `least`, `first`, `most`, the slots of the key, and the time to live. Then the longest time to live,
-- and perhaps the time of a test's clock. Times are in microseconds. The reply has `count`, `usable` and
-- `free`.
local process, sequence, least, first, most, slots, live, longest, now = unpack(ARGV)
sequence, least, first, most, slots = sequence + 0, least + 0, first + 0, most + 0, slots + 0
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
now = now + 0

local stored = forgive('GET', KEYS[1]) or ''
local text = string.match(stored, '^slots1') or 'slots1'
local words = string.sub(stored, #text + 1)
local is_known = stored == '' or string.find(stored, '^slots1') and (words == '' or string.find(words, '^ '))

local others, last, count = 0, now, nil
for word in string.gmatch(words, ' ([^ ]*)') do
  local id, held, number, till = string.match(word, '^(%x+),(%d+),(%d+),(%d+)$')
  is_known = is_known and id
  if not is_known then
    break
  end
  till = math.min(till + 0, now + longest)
  local is_own = id == process
  if till > now and not (is_own and number + 0 < sequence) then
    text = string.format('%s %s,%s,%s,%.0f', text, id, held, number, till)
    last = math.max(last, till)
    if is_own then
      count = held + 0
    else
      others = math.min(others + held, 4294967295)
    end
  end
end
if not is_known then
  return redis.error_reply(
    'FOREIGN the slots of the key have an unknown format: upgrade all processes, or use another prefix for each version')
end

local left = math.max(slots - others, 0)
if not count then
  count = left < first and least or math.min(most, left)
  text = string.format('%s %s,%.0f,%.0f,%.0f', text, process, count, sequence, now + live)
  last = math.max(last, now + live)
end
redis.call('SET', KEYS[1], text, 'PX', string.format('%.0f', math.ceil((last - now) / 1000)))
return { count, math.min(count, left), math.max(left - count, 0) }
