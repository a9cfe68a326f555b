-- MovingWindow. Arguments: amount, period, how many bytes an instant takes.
--
-- The log is a ring of entries in a string of its own: an instant, and the total of all units up to and with it, each modulo
-- what its bytes can say. What is small of it stands with the other states: when all of it is forgotten, the units in it, when the
-- first entry was made, its place, how many entries there are, the last total, and how many there is room for. So as long as
-- nothing leaves, the log need not be read.

-- What a total counts to, and the bytes of the longest string of Redis.
local TOTALS, LONGEST = 4294967296, 536870912

local function log_clear(log)
  log.till, log.units, log.oldest, log.first, log.length, log.total, log.room = 0, 0, 0, 0, 0, 0, 0
end

-- How long ago an entry was made (negative when a clock has gone back since), and its total; nothing when the log is lost.
-- Its neighbour is read with it. What is known of them stands in `ages` and `totals`, by place.
local function log_entry(log, index)
  local place = (log.first + index) % log.room
  if not log.ages then
    log.ages, log.totals = {}, {}
  end
  if not log.ages[place] then
    local last = math.min(place + 1, log.room - 1)
    local bytes = forgive('GETRANGE', log.key, place * log.width, (last + 1) * log.width - 1)
    if not bytes or #bytes ~= (last + 1 - place) * log.width then
      return
    end
    for at = place, last do
      local instant, total = struct.unpack(log.format, bytes, (at - place) * log.width + 1)
      -- None is later than the newest.
      log.ages[at] = log.now - log.newest + (log.newest - instant) % log.instants
      log.totals[at] = total
    end
  end
  if log.ages[place] - (log.now - log.newest) < log.period then
    return log.ages[place], log.totals[place]
  end
end

-- The first entry of which this is so, when it is so of all that follow; the length when it is so of none; nothing when the log is
-- lost. The first two are tried before halving: nearly always it is one of them.
local function log_search(log, is_so)
  local low, high = 0, log.length
  while low < high do
    local middle = low < 2 and low or math.floor((low + high) / 2)
    local age, total = log_entry(log, middle)
    if not age then
      return
    end
    if is_so(age, total) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- Without what is forgotten. A log that is lost is a fresh one.
local function log_expire(log)
  local expired = log_search(log, function(age) return age < log.period end)
  if not expired or expired == log.length then
    log_clear(log)
  elseif expired > 0 then
    local _, before = log_entry(log, expired - 1)
    local age = log_entry(log, expired)
    log.first, log.length = (log.first + expired) % log.room, log.length - expired
    log.units, log.oldest = (log.total - before) % TOTALS, log.now - age
  end
end

-- The log as it is now, and where the text that told of it ends. One that cannot be read is a fresh one.
function log_open(now, key, stored, from, at)
  local till, units, oldest, first, length, total, room, after
  if from then
    till, units, oldest, first, length, total, room, after =
      string.match(stored, '^(%d+),(%d+),(%d+),(%d+),(%d+),(%d+),(%d+)%]()', from)
  end
  local bytes, period = ARGV[at + 2], ARGV[at + 1] + 0
  -- All of its fields stand here: a table that grows is made anew.
  local log = {
    now = now, key = key, stored = stored, amount = ARGV[at] + 0, period = period, newest = (till or 0) - period,
    format = '>I' .. bytes .. 'I4', width = bytes + 4, instants = 256 ^ bytes, ages = false, totals = false,
    till = (till or 0) + 0, units = (units or 0) + 0, oldest = (oldest or 0) + 0, first = (first or 0) + 0,
    length = (length or 0) + 0, total = (total or 0) % TOTALS, room = (room or 0) + 0,
  }
  if not after or log.till <= now or log.till >= TWO_54 or log.units >= TOTALS or log.length == 0
    or log.length > log.room or log.first >= log.room or log.room * log.width > LONGEST then
    log_clear(log)
  elseif now - log.oldest >= period then
    log_expire(log)
  end
  return log, after
end

-- Microseconds until no more than so many units are left in the window; of a log that is lost, until the oldest has left, when
-- that will be found out.
local function log_falls_to(log, units)
  local leaving, age = log.units - units, log.now - log.oldest
  if leaving <= 0 or log.length == 0 then
    return 0
  elseif leaving > 1 then
    local before = log.total - log.units
    local index = log_search(log, function(_, total) return (total - before) % TOTALS >= leaving end)
    age = index and index < log.length and log_entry(log, index) or age
  end
  return log.period - math.max(math.min(age, log.period - 1), 0)
end

-- What is told of it: the units in it, and microseconds until more remain, and until the cost fits.
function log_told(log, cost)
  local remaining = math.max(log.amount - log.units, 0)
  local reset = log.units > 0 and log_falls_to(log, log.amount - math.min(remaining + 1, log.amount)) or 0
  return log.units, reset, cost > remaining and log_falls_to(log, log.amount - cost) or 0
end

-- Runs each command that is still to come, so that a missing right is found before an entry is changed in place. New entries need
-- no such care: until the small states are stored, which is last, nothing reads them.
local function log_try_rights(log, keep)
  if keep then
    redis.call('PEXPIRE', log.key, keep)
  end
  forgive('STRLEN', log.key)
  forgive('GETRANGE', log.key, 0, 0)
  redis.call('SET', KEYS[1], log.stored, 'KEEPTTL')
end

-- Adds a hit. What is ahead of now counts as made now from here on.
function log_add(log, cost)
  local now = log.now
  local is_lost, is_again = false, log.length > 0 and log.newest == now
  local is_in_place = log.length > 0 and log.newest >= now
  if log.length > 0 and log.newest > now then
    local past = log_search(log, function(age) return age < 0 end)
    is_lost, log.length = not past, past or 0
    is_again = log.length > 0 and log_entry(log, log.length - 1) == 0
  end
  -- It is kept for an eighth longer than it matters, and so has to be told to stay only once in an eighth of a period.
  local eighth = log.period / 8
  local is_kept = math.floor(now / eighth) == math.floor(log.newest / eighth) and not ARGV[NOW]
  if log.length == 0 then
    log.oldest = now
  end
  log.total, log.units = (log.total + cost) % TOTALS, log.units + cost
  if not is_again then
    log.length = log.length + 1
  end
  log.till, log.newest = now + log.period, now
  local entry = struct.pack(log.format, now % log.instants, log.total)
  local keep = (log.period + eighth) / 1000 + GRACE
  keep = keep - keep % 1
  if is_in_place then
    log_try_rights(log, keep)
  end
  local old = ''
  if not is_lost and log.length <= log.room then
    local place = (log.first + log.length - 1) % log.room
    -- At the last place a log that was lost would look like one that was not.
    local is_there = place < log.room - 1 or forgive('STRLEN', log.key) == log.room * log.width
    if is_there and not is_kept then
      redis.call('PEXPIRE', log.key, keep)
    end
    if is_there and forgive('SETRANGE', log.key, place * log.width, entry) == log.room * log.width then
      if log.ages then
        log.ages[place], log.totals[place] = 0, log.total
      end
      return
    end
  elseif not is_lost and log.room > 0 then
    -- It grows by being written anew, which takes no more memory than is asked for.
    old = forgive('GET', log.key)
    if old and #old == log.room * log.width then
      local cut = log.first * log.width
      old = string.sub(old, cut + 1) .. string.sub(old, 1, cut)
      old = string.sub(old, 1, (log.length - 1) * log.width)
    else
      old = ''
    end
  end
  if old == '' then
    log.units, log.length, log.oldest, log.room = cost, 1, now, 0
  end
  log.ages = false
  log.first, log.room = 0, math.max(math.min(log.room * 2, log.amount), log.length, 4)
  local padding = string.rep('\0', (log.room - log.length) * log.width)
  redis.call('SET', log.key, old .. entry .. padding, 'PX', keep)
end

function log_text(log, tag)
  return string.format('%s%d%08d,%u,%d%08d,%u,%u,%u,%u]', tag, log.till / 100000000, log.till % 100000000, log.units,
    log.oldest / 100000000, log.oldest % 100000000, log.first, log.length, log.total, log.room)
end

-- Only for refunds.

-- Gives a hit back. Takes as long as there are later ones.
function log_take_back(log, made, cost)
  local age = log.now - made
  if log.length == 0 or forgive('STRLEN', log.key) ~= log.room * log.width then
    return false
  end
  local index = log_search(log, function(other) return other <= age end)
  if not index or index == log.length or log_entry(log, index) ~= age then
    return false
  end
  log_try_rights(log)
  local before = log.total - log.units
  if index > 0 then
    local _, total = log_entry(log, index - 1)
    before = total
  end
  local _, total = log_entry(log, index)
  local units = (total - before) % TOTALS
  local taken = math.min(cost, units)
  if taken == units and index == 0 then
    log.first = (log.first + 1) % log.room
    log.length = log.length - 1
  else
    -- An entry of which nothing is left makes way.
    local gone = taken == units and 1 or 0
    for later = index, log.length - 1 - gone do
      local from, to = (log.first + later + gone) % log.room * log.width, (log.first + later) % log.room * log.width
      local instant, sum = struct.unpack(log.format, redis.call('GETRANGE', log.key, from, from + log.width - 1))
      redis.call('SETRANGE', log.key, to, struct.pack(log.format, instant, (sum - taken) % TOTALS))
    end
    log.length, log.total = log.length - gone, (log.total - taken) % TOTALS
  end
  log.units, log.ages = log.units - taken, false
  local oldest, newest
  if log.length > 0 then
    oldest, newest = log_entry(log, 0), log_entry(log, log.length - 1)
  end
  if not newest then
    redis.call('UNLINK', log.key)
    log.till = 0
    return true
  end
  log.oldest, log.newest = log.now - oldest, log.now - newest
  log.till = log.newest + log.period
  return true
end
