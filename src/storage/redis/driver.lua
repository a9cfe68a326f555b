-- Decides on a policy.
--
-- KEYS: the small states of all limits; then, for each moving window, its log.
-- ARGV: hit, peek or refund; the time (empty: the server's); the cost; in a refund the time of the hit; then for each limit
-- STRIDE words: its tag, its strategy, five arguments of its strategy, and in a refund from when on the hit is forgotten, and
-- its anchor.
-- Answers the time; whether all limits admitted; then four numbers for each limit: of a small state when it is forgotten, its
-- two amounts, and the delay; of a log the units in it, and microseconds until more remain and until the cost fits.

local op, cost = ARGV[1], tonumber(ARGV[3])
local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local stored = redis.pcall('GET', KEYS[1])
if type(stored) ~= 'string' then
  stored = ''
end

-- What each limit remembers: written by the same strategy at the same place, else nothing.
local till, first, second, logs, kept = {}, {}, {}, {}, {}
local limits, position, log_keys = 0, 1, 1
for at = 5, #ARGV, STRIDE do
  limits = limits + 1
  local _, last, tag, numbers = string.find(stored, '^([^:;]*):([%d,]*);?', position)
  if not last then
    -- Nothing here, or nothing that can be read: whatever it is, up to the next one.
    _, last = string.find(stored, '^[^;]*;?', position)
  end
  position = last + 1
  if tag ~= ARGV[at] then
    numbers = ''
  end
  till[limits], first[limits], second[limits] = 0, 0, 0
  if ARGV[at + 1] == 'moving-window' then
    log_keys = log_keys + 1
    logs[limits] = log_open(now, KEYS[log_keys], numbers, at + 2)
  else
    local forgotten, a, b = string.match(numbers, '^(%d+),(%d+),(%d+)$')
    forgotten, a, b = tonumber(forgotten), tonumber(a), tonumber(b)
    if forgotten and forgotten > now and forgotten < 9007199254740992 and a < TWO_32 and b < TWO_32 then
      till[limits], first[limits], second[limits] = forgotten, a, b
    end
  end
end

-- Writes down what is left, for as long as it matters. An instant in two pieces: `%d` is four times as fast as `%.0f`, but
-- where C's long has 32 bits it cannot say a whole one.
local function save()
  local texts, latest = {}, 0
  for i = 1, limits do
    local tag, log = ARGV[5 + (i - 1) * STRIDE], logs[i]
    if log and log.till > now then
      texts[i] = string.format('%s:%d%08d,%u,%u,%u,%u,%u', tag,
        log.till / 100000000, log.till % 100000000, log.first, log.length, log.units, log.total, log.room)
      latest = math.max(latest, log.till)
    elseif till[i] > now then
      texts[i] = string.format('%s:%d%08d,%u,%u', tag, till[i] / 100000000, till[i] % 100000000, first[i], second[i])
      latest = math.max(latest, till[i])
    else
      texts[i] = '-'
    end
  end
  if latest > now then
    redis.call('SET', KEYS[1], table.concat(texts, ';'), 'PX', math.ceil((latest - now) / 1000) + GRACE)
  else
    redis.call('DEL', unpack(KEYS))
  end
end

if op == 'refund' then
  local changed = false
  for i = 1, limits do
    local at = 5 + (i - 1) * STRIDE
    local hit = { at = ARGV[4] + 0, till = ARGV[at + 7] + 0, anchor = ARGV[at + 8] + 0 }
    if now < hit.till then
      if logs[i] then
        changed = log_take_back(logs[i], hit.at, cost) or changed
      elseif till[i] > now then
        local forgotten, a, b = twins[ARGV[at + 1]].refund(now, cost, till[i], first[i], second[i], at + 2, hit)
        if forgotten then
          till[i], first[i], second[i] = forgotten, a, b
          changed = true
        end
      end
    end
  end
  if changed then
    save()
  end
  return { string.format('%.0f', now) }
end

-- All limits are asked, and spend only when all admit.
local new_till, new_first, new_second, delays = {}, {}, {}, {}
local admitted = 1
for i = 1, limits do
  local at, log = 5 + (i - 1) * STRIDE, logs[i]
  if cost == 0 then
    delays[i] = 0
  elseif log then
    if log.units + cost > log.amount then
      admitted = 0
    end
  else
    local forgotten, a, b, delay =
      twins[ARGV[at + 1]].hit(now, cost, till[i], first[i], second[i], at + 2)
    if forgotten then
      new_till[i], new_first[i], new_second[i], delays[i] = forgotten, a, b, delay
    else
      admitted = 0
    end
  end
end

if op == 'hit' and cost > 0 then
  if admitted == 1 then
    for i = 1, limits do
      if logs[i] then
        log_add(logs[i], cost)
      else
        till[i], first[i], second[i] = new_till[i], new_first[i], new_second[i]
      end
    end
    save()
  else
    local changed = false
    for i = 1, limits do
      local at = 5 + (i - 1) * STRIDE
      local twin = twins[ARGV[at + 1]]
      if twin and twin.refuse and till[i] > now then
        local forgotten, a, b = twin.refuse(now, till[i], first[i], second[i], at + 2)
        if forgotten then
          till[i], first[i], second[i] = forgotten, a, b
          changed = true
        end
      end
    end
    if changed then
      save()
    end
  end
end

local answer = { now, admitted }
for i = 1, limits do
  local log, at = logs[i], 3 + (i - 1) * 4
  if log then
    local units, reset = log_told(log)
    answer[at], answer[at + 1], answer[at + 3] = units, reset, 0
    answer[at + 2] = (admitted == 0 or op == 'peek') and log_falls_to(log, log.amount - cost) or 0
  else
    answer[at], answer[at + 1], answer[at + 2], answer[at + 3] = till[i], first[i], second[i], delays[i] or 0
  end
end
return answer
