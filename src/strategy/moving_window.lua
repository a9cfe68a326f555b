-- MovingWindow. Arguments: amount, period, how many bytes an instant takes.
--
-- The log is a ring of entries in a string of its own: an instant, and the total of all units up to and with it, each modulo
-- what its bytes can say. What is small of it stands with the other states: when all of it is forgotten, where the first entry
-- is, how many there are, the units in them, the last total, and how many entries there is room for.

local TOTALS = 4294967296

-- How long ago an entry was made (negative when a clock has gone back since), and its total. Each is read once: what is
-- known of them stands in `ages` and `totals`, by place.
local function log_entry(log, index)
  local place = (log.first + index) % log.room * log.width
  local age, total = log.ages[place], log.totals[place]
  if not age then
    age, total = struct.unpack(log.format, redis.call('GETRANGE', log.key, place, place + log.width - 1))
    age = (log.now - age) % log.instants
    if age >= log.instants / 2 then
      age = age - log.instants
    end
    log.ages[place], log.totals[place] = age, total
  end
  return age, total
end

-- The first entry of which this is so, when it is so of all that follow; the length when it is so of none. The first two are
-- tried before halving: nearly always it is one of them.
local function log_search(log, is_so)
  local low, high = 0, log.length
  for index = 0, math.min(1, high - 1) do
    if is_so(log_entry(log, index)) then
      return index
    end
    low = index + 1
  end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_so(log_entry(log, middle)) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

local function log_clear(log)
  log.first, log.length, log.units, log.total = 0, 0, 0, 0
end

-- The log as it is now, without what is forgotten. One that cannot be read is a fresh one.
local function log_open(now, key, small, at)
  local bytes = tonumber(ARGV[at + 2])
  local log = {
    now = now, key = key, amount = tonumber(ARGV[at]), period = tonumber(ARGV[at + 1]),
    format = '>I' .. bytes .. 'I4', width = bytes + 4, instants = 256 ^ bytes,
    till = 0, room = 0, ages = {}, totals = {},
  }
  log_clear(log)
  local till, first, length, units, total, room = string.match(small, '^(%d+),(%d+),(%d+),(%d+),(%d+),(%d+)$')
  if not till or redis.pcall('STRLEN', key) ~= room * log.width then
    return log
  end
  log.till, log.room = till + 0, room + 0
  log.first, log.length, log.units, log.total = first + 0, length + 0, units + 0, total + 0
  if log.till <= now or log.length == 0 or log.length > log.room or log.first >= log.room then
    log_clear(log)
    return log
  end
  local expired = log_search(log, function(age) return age < log.period end)
  if expired == log.length then
    log_clear(log)
  elseif expired > 0 then
    local _, before = log_entry(log, expired - 1)
    log.first, log.length = (log.first + expired) % log.room, log.length - expired
    log.units = (log.total - before) % TOTALS
  end
  return log
end

-- Microseconds until no more than so many units are left in the window.
local function log_falls_to(log, units)
  local leaving = log.units - units
  if leaving <= 0 or log.length == 0 then
    return 0
  end
  local before = log.total - log.units
  local index = log_search(log, function(_, total) return (total - before) % TOTALS >= leaving end)
  local age = log_entry(log, math.min(index, log.length - 1))
  return log.period - math.max(age, 0)
end

-- What is told of it: the units in it, and microseconds until more remain.
local function log_told(log)
  if log.units == 0 then
    return 0, 0
  end
  local remaining = math.max(log.amount - log.units, 0)
  return log.units, log_falls_to(log, log.amount - math.min(remaining + 1, log.amount))
end

-- Adds a hit. What is ahead of now counts as made now from here on.
local function log_add(log, cost)
  local now = log.now
  -- The last entry was made a period before all is forgotten.
  local again = log.length > 0 and log.till - log.period == now
  if log.length > 0 and log.till - log.period > now then
    log.length = log_search(log, function(age) return age < 0 end)
    again = log.length > 0 and log_entry(log, log.length - 1) == 0
  end
  log.total, log.units = (log.total + cost) % TOTALS, log.units + cost
  if not again then
    log.length = log.length + 1
  end
  local entry = struct.pack(log.format, now % log.instants, log.total)
  log.till = now + log.period
  local keep = math.ceil(log.period / 1000) + GRACE
  if log.length <= log.room then
    local place = (log.first + log.length - 1) % log.room
    redis.call('SETRANGE', log.key, place * log.width, entry)
    log.ages[place * log.width], log.totals[place * log.width] = 0, log.total
    redis.call('PEXPIRE', log.key, keep)
    return
  end
  -- It grows by being written anew, which takes no more memory than is asked for.
  local old = ''
  if log.room > 0 then
    old = redis.call('GET', log.key)
    local cut = log.first * log.width
    old = string.sub(old, cut + 1) .. string.sub(old, 1, cut)
  end
  log.ages, log.totals = {}, {}
  log.first, log.room = 0, math.max(math.min(log.room * 2, log.amount), log.length, 4)
  local text = string.sub(old, 1, (log.length - 1) * log.width) .. entry
  redis.call('SET', log.key, text .. string.rep('\0', log.room * log.width - #text), 'PX', keep)
end

-- Only for refunds.

-- Gives a hit back. Takes as long as there are later ones.
local function log_take_back(log, made, cost)
  local age = log.now - made
  local index = log_search(log, function(other) return other <= age end)
  if index == log.length or log_entry(log, index) ~= age then
    return false
  end
  local before = log.total - log.units
  if index > 0 then
    local _, total = log_entry(log, index - 1)
    before = total
  end
  local _, total = log_entry(log, index)
  local taken = math.min(cost, (total - before) % TOTALS)
  log.ages, log.totals = {}, {}
  for later = index, log.length - 1 do
    local place = (log.first + later) % log.room * log.width
    local instant, sum = struct.unpack(log.format, redis.call('GETRANGE', log.key, place, place + log.width - 1))
    redis.call('SETRANGE', log.key, place, struct.pack(log.format, instant, (sum - taken) % TOTALS))
  end
  log.total, log.units = (log.total - taken) % TOTALS, log.units - taken
  if log.units == 0 then
    log.till = 0
    return true
  end
  -- Entries without units at the end say nothing any more.
  while true do
    local last_age, last = log_entry(log, log.length - 1)
    local previous = log.total - log.units
    if log.length > 1 then
      local _, sum = log_entry(log, log.length - 2)
      previous = sum
    end
    if (last - previous) % TOTALS > 0 then
      log.till = log.now - last_age + log.period
      return true
    end
    log.length = log.length - 1
  end
end
