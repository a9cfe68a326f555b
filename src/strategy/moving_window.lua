-- MovingWindow. Arguments: amount, period, how many bytes an instant takes.
--
-- The log is a ring of entries in a string of its own. An entry is an instant, modulo what its bytes can say, and
-- the units admitted at it. The small states hold the rest: when all of it is forgotten, the units in it, the
-- instant of the first entry, its place, the number of places in use, and the number of places. So as long as nothing
-- leaves, the log need not be read.
--
-- A log of more than CHUNK places is divided into chunks and ends with a table. Its rows are a ring in the order of
-- time. A row holds the sum of a chunk's units, the number of its entries, and where in the string it lies. So units
-- are summed by rows, and a refund changes one chunk and one row, joins two chunks or removes a row.
--
-- A row is right for a chunk between the first and the last one. It is not read for these two, except for the number
-- of entries where places without units follow. The first and the last one are not the same chunk, unless it is the
-- only one. A chunk in between keeps all its places: those without an entry are at its end, with no units and the
-- instant of an entry before them.

-- The places of a chunk, the bytes of a row, and the bytes of the longest string of Redis.
local CHUNK, ROW, LONGEST = 256, 10, 536870912

local function log_clear(log)
  log.till, log.units, log.oldest, log.first, log.length, log.room = 0, 0, 0, 0, 0, 0
end

local function log_size(log)
  return log.room * log.width + (log.room > CHUNK and log.room / CHUNK * ROW or 0)
end

-- Returns a row: the sum, the number of entries, and which chunk of the string it is. Nothing when the log is lost.
-- The first few rows are read one by one, then the table is read as a whole.
local function log_row(log, row)
  local from, bytes = log.room * log.width, log.rows
  if not bytes and log.asked < 4 then
    log.asked = log.asked + 1
    bytes, row = forgive('GETRANGE', log.key, from + row * ROW, from + row * ROW + ROW - 1), 0
  elseif not bytes then
    log.rows = forgive('GETRANGE', log.key, from, log_size(log) - 1)
    bytes = log.rows
  end
  if bytes and #bytes >= row * ROW + ROW then
    return struct.unpack('>I4I2I4', bytes, row * ROW + 1)
  end
end

-- Returns where the bytes of a place begin; nothing when the log is lost.
local function log_at(log, place)
  if log.room <= CHUNK then
    return place * log.width
  end
  local _, _, chunk = log_row(log, math.floor(place / CHUNK))
  return chunk and (chunk * CHUNK + place % CHUNK) * log.width
end

-- Returns how long ago an entry was made (negative when a clock has gone back since), and its units; nothing when the
-- log is lost. The next entry is read with it. `ages` and `each` cache both by place.
local function log_entry(log, index)
  local place = (log.first + index) % log.room
  if not log.ages then
    log.ages, log.each = {}, {}
  end
  if not log.ages[place] then
    local last, from = math.min(place + 1, place - place % CHUNK + CHUNK - 1, log.room - 1), log_at(log, place)
    local bytes = from and forgive('GETRANGE', log.key, from, from + (last + 1 - place) * log.width - 1)
    if not bytes or #bytes ~= (last + 1 - place) * log.width then
      return
    end
    for at = place, last do
      local instant, units = struct.unpack(log.format, bytes, (at - place) * log.width + 1)
      -- None is later than the newest.
      log.ages[at] = log.now - log.newest + (log.newest - instant) % log.instants
      log.each[at] = units
    end
  end
  if log.ages[place] - (log.now - log.newest) < log.period then
    return log.ages[place], log.each[place]
  end
end

-- Returns the index of the first entry that matches, when all later ones match too; the length when none does;
-- nothing when the log is lost. The first two are tried before halving: nearly always it is one of them.
local function log_search(log, is_so)
  local low, high = 0, log.length
  while low < high do
    local middle = low < 2 and low or math.floor((low + high) / 2)
    local age = log_entry(log, middle)
    if not age then
      return
    end
    if is_so(age) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- Returns the bytes of entries, which are in one chunk where there are several; nothing when the log is lost.
local function log_read(log, index, count)
  local place = (log.first + index) % log.room
  local straight, from = math.min(count, log.room - place), log_at(log, place)
  local bytes = from and forgive('GETRANGE', log.key, from, from + straight * log.width - 1) or ''
  if straight < count then
    bytes = bytes .. (forgive('GETRANGE', log.key, 0, (count - straight) * log.width - 1) or '')
  end
  return #bytes == count * log.width and bytes or nil
end

-- Returns the units of each entry in these bytes, from an offset on, and one number more. Lua's stack bounds `count`.
local function log_unpack(log, bytes, from, count)
  local format = string.rep(string.rep('x', log.width - 4) .. 'I4', count)
  return { struct.unpack('>' .. format, bytes, from * log.width + 1) }
end

-- Counts entries from the oldest on, until the next one's units would make the sum enough, and `count` at most.
-- Returns their number and the sum of their units; nothing when the log is lost.
local function log_pass(log, count, enough)
  local index, passed = 0, 0
  while index < count do
    local place = (log.first + index) % log.room
    local step = math.min(CHUNK - place % CHUNK, log.room - place, count - index)
    local sum = step == CHUNK and log.room > CHUNK and log_row(log, place / CHUNK)
    if sum and passed + sum < enough then
      index, passed = index + step, passed + sum
    else
      step = math.min(step, 32)
      local bytes = log_read(log, index, step)
      if not bytes then
        return
      end
      local each = log_unpack(log, bytes, 0, step)
      for at = 1, step do
        if passed + each[at] >= enough then
          return index + at - 1, passed
        end
        passed = passed + each[at]
      end
      index = index + step
    end
  end
  return count, passed
end

-- Skips places without units at the front, which are the rest of a chunk.
local function log_skip(log)
  local _, units = log_entry(log, 0)
  if units == 0 then
    local rest = math.min(CHUNK - log.first % CHUNK, log.length - 1)
    log.first, log.length = (log.first + rest) % log.room, log.length - rest
  end
end

-- Without what is forgotten. A log that is lost is a fresh one.
local function log_expire(log)
  local expired = log_search(log, function(age) return age < log.period end)
  if expired == 0 then
    return
  end
  local gone, _
  if expired == 1 then
    _, gone = log_entry(log, 0)
  elseif expired and expired < log.length then
    _, gone = log_pass(log, expired, math.huge)
  end
  if not gone or gone >= log.units or expired == log.length then
    log_clear(log)
    return
  end
  log.first, log.length, log.units = (log.first + expired) % log.room, log.length - expired, log.units - gone
  log_skip(log)
  log.oldest = log.now - log_entry(log, 0)
end

-- The log as it is now, and where the text that told of it ends. One that cannot be read is a fresh one.
function log_open(now, key, stored, from, at)
  local till, units, oldest, first, length, room, after
  if from then
    till, units, oldest, first, length, room, after =
      string.match(stored, '^(%d+),(%d+),(%d+),(%d+),(%d+),(%d+)%]()', from)
  end
  local bytes, period = ARGV[at + 2], ARGV[at + 1] + 0
  -- All of its fields stand here: a table that grows is made anew.
  local log = {
    now = now, key = key, stored = stored, amount = ARGV[at] + 0, period = period, newest = (till or 0) - period,
    format = '>I' .. bytes .. 'I4', width = bytes + 4, instants = 256 ^ bytes,
    ages = false, each = false, rows = false, asked = 0,
    till = (till or 0) + 0, units = (units or 0) + 0, oldest = (oldest or 0) + 0, first = (first or 0) + 0,
    length = (length or 0) + 0, room = (room or 0) + 0,
  }
  if not after or log.till <= now or log.till >= TWO_54 or log.units >= TWO_32 or log.length == 0
    or log.length > log.room or log.first >= log.room
    or log.room > CHUNK and (log.room % CHUNK > 0 or log.first % CHUNK + log.length > log.room)
    or log_size(log) > LONGEST then
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
    local index = log_pass(log, log.length, leaving)
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

-- Runs each command that is still to come, so that a missing right is found before an entry is changed in place. For
-- new entries this is not needed: nothing reads them until the small states are stored, which is last.
local function log_try_rights(log, keep)
  if keep then
    redis.call('PEXPIRE', log.key, keep)
  end
  forgive('STRLEN', log.key)
  forgive('GETRANGE', log.key, 0, 0)
  redis.call('SET', KEYS[1], log.stored, 'KEEPTTL')
end

local function log_write_row(log, row, sum, many, chunk)
  redis.call('SETRANGE', log.key, log.room * log.width + row * ROW, struct.pack('>I4I2I4', sum % TWO_32, many, chunk))
  log.rows = false
end

-- Writes the row of a chunk whose last place is in use now.
local function log_complete(log, row)
  local sum, _, _, chunk = 0, log_row(log, row)
  local bytes = redis.call('GETRANGE', log.key, chunk * CHUNK * log.width, (chunk + 1) * CHUNK * log.width - 1)
  for at = 0, CHUNK - 1, 32 do
    local each = log_unpack(log, bytes, at, 32)
    for entry = 1, 32 do
      sum = sum + each[entry]
    end
  end
  log_write_row(log, row, sum, CHUNK, chunk)
end

-- Makes room in a full ring. Returns false when the log is lost.
local function log_grow(log, keep)
  if forgive('STRLEN', log.key) ~= log_size(log) then
    return false
  end
  log_try_rights(log, keep)
  local room = log.room
  if room < CHUNK then
    -- A short one is written anew, which takes no more memory than is asked for.
    local bytes = log_read(log, 0, room)
    log.room, log.first = math.min(math.max(math.min(room * 2, log.amount), room + 1), CHUNK), 0
    redis.call('SET', log.key, bytes .. string.rep('\0', (log.room - room) * log.width), 'PX', keep)
  elseif room == CHUNK then
    local bytes, _, sum = log_read(log, 0, CHUNK), log_pass(log, CHUNK, math.huge)
    log.room, log.first = 2 * CHUNK, 0
    local rows = struct.pack('>I4I2I4I4I2I4', sum, CHUNK, 0, 0, 0, 1)
    redis.call('SET', log.key, bytes .. string.rep('\0', CHUNK * log.width) .. rows, 'PX', keep)
  else
    -- A long one gets more chunks at the end of the string, and their rows in front of the first entry's row.
    local rows = redis.call('GETRANGE', log.key, room * log.width, -1)
    local count, first = room / CHUNK, math.floor(log.first / CHUNK)
    local more, new = math.min(math.ceil(count / 8), 64), ''
    for chunk = count, count + more - 1 do
      new = new .. struct.pack('>I4I2I4', 0, 0, chunk)
    end
    if first > 0 then
      rows = string.sub(rows, 1, first * ROW) .. new .. string.sub(rows, first * ROW + 1)
      log.first = log.first + more * CHUNK
    else
      rows = rows .. new
    end
    log.room = room + more * CHUNK
    redis.call('SETRANGE', log.key, log.room * log.width, rows)
  end
  log.ages, log.rows = false, false
  return true
end

-- Cuts off places without units at the end.
local function log_trim(log)
  if log.room > CHUNK and log.length > 0 then
    local place = (log.first + log.length - 1) % log.room
    local _, units = log_entry(log, log.length - 1)
    if units == 0 then
      local _, many = log_row(log, math.floor(place / CHUNK))
      log.length = math.max(log.length - (place % CHUNK + 1 - many), 0)
    end
  end
end

-- Adds a hit. What is ahead of now counts as made now from here on.
function log_add(log, cost)
  local now, units = log.now, cost
  local is_lost, is_in_place = false, log.length > 0 and log.newest >= now
  local is_again = is_in_place and log.newest == now
  if is_in_place and not is_again then
    local past = log_search(log, function(age) return age < 0 end)
    if past then
      log.length = past
      log_trim(log)
      past = log.length
    end
    is_again = past and past > 0 and log_entry(log, past - 1) == 0
    local _, before = log_pass(log, past and (is_again and past - 1 or past) or 0, math.huge)
    is_lost, log.length = not past or not before or before > log.units, past or 0
    units = is_lost and cost or log.units - before + cost
  elseif is_again then
    local _, before = log_entry(log, log.length - 1)
    is_lost, units = not before, (before or 0) + cost
  end
  -- It is kept for an eighth longer than it matters, and so has to be told to stay only once in an eighth of a period.
  local eighth = log.period / 8
  local is_kept = math.floor(now / eighth) == math.floor(log.newest / eighth) and not ARGV[NOW]
  local keep = (log.period + eighth) / 1000 + GRACE
  keep = keep - keep % 1
  if is_in_place then
    log_try_rights(log, keep)
  end
  if log.length == 0 then
    log.oldest = now
  end
  if not is_lost and not is_again and log.room > 0
    and log.length + (log.room > CHUNK and log.first % CHUNK or 0) == log.room then
    is_lost = not log_grow(log, keep)
  end
  if not is_again then
    log.length = log.length + 1
  end
  log.till, log.newest, log.units = now + log.period, now, log.units + cost
  local entry = struct.pack(log.format, now % log.instants, units)
  if not is_lost and log.room > 0 then
    local place, size = (log.first + log.length - 1) % log.room, log_size(log)
    -- At the last place a log that was lost would look like one that was not.
    local from = log_at(log, place)
    local is_there = from and from + log.width < size or forgive('STRLEN', log.key) == size
    if is_there and not is_kept then
      redis.call('PEXPIRE', log.key, keep)
    end
    if is_there and forgive('SETRANGE', log.key, from, entry) == size then
      if log.ages then
        log.ages[place], log.each[place] = 0, units
      end
      if log.room > CHUNK and place % CHUNK == CHUNK - 1 then
        log_complete(log, (place + 1) / CHUNK - 1)
      end
      return
    end
  end
  log.units, log.length, log.oldest, log.first, log.room, log.ages = cost, 1, now, 0, 4, false
  entry = struct.pack(log.format, now % log.instants, cost)
  redis.call('SET', log.key, entry .. string.rep('\0', 3 * log.width), 'PX', keep)
end

function log_text(log, tag)
  return string.format('%s%d%08d,%u,%d%08d,%u,%u,%u]', tag, log.till / 100000000, log.till % 100000000, log.units,
    log.oldest / 100000000, log.oldest % 100000000, log.first, log.length, log.room)
end

-- Only for refunds.

-- Removes the row of a chunk in between, by its number from the first. The chunk is free then.
local function log_drop(log, number)
  local from, first = log.room * log.width, math.floor(log.first / CHUNK) * ROW
  local rows = redis.call('GETRANGE', log.key, from, -1)
  rows = string.sub(rows, first + 1) .. string.sub(rows, 1, first)
  local cut = number * ROW
  rows = string.sub(rows, 1, cut) .. string.sub(rows, cut + ROW + 1) .. string.sub(rows, cut + 1, cut + ROW)
  redis.call('SETRANGE', log.key, from, string.sub(rows, #rows - first + 1) .. string.sub(rows, 1, #rows - first))
  log.length, log.rows = log.length - CHUNK, false
end

-- Writes the entries of a chunk in between, from a place on, and fills its other places.
local function log_fill(log, chunk, at, entries)
  local last = string.sub(entries, -log.width, -5) .. '\0\0\0\0'
  local missing = CHUNK - at - #entries / log.width
  redis.call('SETRANGE', log.key, (chunk * CHUNK + at) * log.width, entries .. string.rep(last, missing))
end

-- Moves the entries of the next chunk into this one, if both are in between and there is room.
local function log_join(log, number)
  local count, last = log.room / CHUNK, math.floor((log.first % CHUNK + log.length - 1) / CHUNK)
  if number < 0 or number + 1 >= last or number == 0 and log.first % CHUNK > 0 then
    return
  end
  local row = (math.floor(log.first / CHUNK) + number) % count
  local sum, many, chunk = log_row(log, row)
  local other_sum, others, other = log_row(log, (row + 1) % count)
  if many + others <= CHUNK then
    local from = other * CHUNK * log.width
    local entries = redis.call('GETRANGE', log.key, from, from + others * log.width - 1)
    log_fill(log, chunk, many, entries)
    log_write_row(log, row, sum + other_sum, many + others, chunk)
    log_drop(log, number + 1)
  end
end

-- Takes units from an entry, and removes it when it has no more.
local function log_take(log, index, units, taken)
  local place, count = (log.first + index) % log.room, log.room / CHUNK
  local offset, number, last, row, sum, many, chunk = place % CHUNK, 0, 0
  if log.room > CHUNK then
    number = math.floor((log.first % CHUNK + index) / CHUNK)
    last = math.floor((log.first % CHUNK + log.length - 1) / CHUNK)
    row = math.floor(place / CHUNK)
    sum, many, chunk = log_row(log, row)
  end
  local from = log_at(log, place)
  local is_between = number < last and (number > 0 or log.first % CHUNK == 0)
  if taken < units then
    redis.call('SETRANGE', log.key, from + log.width - 4, struct.pack('>I4', units - taken))
    if row then
      log_write_row(log, row, sum - taken, many, chunk)
    end
  elseif index == 0 and not is_between or number < last and not is_between then
    -- The first chunk, of which some has been forgotten: its entries up to this one move on by one place.
    if index > 0 then
      redis.call('SETRANGE', log.key, log_at(log, log.first) + log.width, log_read(log, 0, index))
    end
    log.first, log.length, log.ages = (log.first + 1) % log.room, log.length - 1, false
    if log.length > 0 then
      log_skip(log)
    end
  elseif not is_between then
    local behind = log.length - 1 - index
    if behind > 0 then
      local bytes, straight = log_read(log, index + 1, behind), log.room - place
      redis.call('SETRANGE', log.key, from, string.sub(bytes, 1, straight * log.width))
      if straight < behind then
        redis.call('SETRANGE', log.key, 0, string.sub(bytes, straight * log.width + 1))
      end
    end
    log.length, log.ages = log.length - 1, false
    log_trim(log)
  elseif many == 1 then
    log_drop(log, number)
  else
    local base = chunk * CHUNK * log.width
    local entries = redis.call('GETRANGE', log.key, base, base + many * log.width - 1)
    entries = string.sub(entries, 1, offset * log.width) .. string.sub(entries, (offset + 1) * log.width + 1)
    log_fill(log, chunk, 0, entries)
    log_write_row(log, row, sum - units, many - 1, chunk)
    log_join(log, number)
    log_join(log, number - 1)
  end
  log.ages = false
end

-- Gives a hit back.
function log_take_back(log, made, cost)
  local age = log.now - made
  if log.length == 0 or forgive('STRLEN', log.key) ~= log_size(log) then
    return false
  end
  local index = log_search(log, function(other) return other <= age end)
  local same, units = log_entry(log, index and math.min(index, log.length - 1) or 0)
  if not index or index == log.length or same ~= age or units == 0 then
    return false
  end
  log_try_rights(log)
  local taken = math.min(cost, units)
  log_take(log, index, units, taken)
  log.units = math.max(log.units - taken, 0)
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
