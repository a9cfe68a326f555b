-- The script of MovingWindow. Arguments: the amount, the period in microseconds, and the number of
-- bytes of an instant.
--
-- The log is a ring of entries in a separate string. An entry has an instant, truncated to its
-- number of bytes, and the units admitted at that instant. The record in the small states has the
-- rest: the end of the newest entry, the units in the log, the instant of the first entry, its
-- place, the number of places in use, the number of places, and the chunks of the first and of the
-- last entry. So a hit reads the log only when an entry expires.
--
-- A log of more than CHUNK places is divided into chunks and ends with a table. The rows of the
-- table are a ring in chronological order. A row has the sum of a chunk's units, the number of its
-- entries, and the chunk's position in the string. So units are summed by rows, and a refund
-- changes one chunk and one row, joins two chunks or removes a row.
--
-- Rows are valid for inner chunks, which are those between the first and the last one. For the
-- first and the last chunk, only the number of entries is read, and only when places without units
-- follow. The first and the last chunk differ, unless there is only one. An inner chunk keeps all
-- its places. Those without an entry are at its end. They have no units, and the instant of an
-- entry before them.
--
-- A log is lost if its string is missing, has the wrong type or length, or has invalid rows. A lost
-- log counts as empty.

-- The places of a chunk, the bytes of a row, and the bytes of the longest string in Redis.
local CHUNK, ROW, LONGEST = 256, 10, 536870912

-- A log of fewer places is rewritten to grow. That saves up to half the memory, because SETRANGE
-- makes Redis allocate twice the bytes of a growing string. It is slower than SETRANGE, so longer
-- logs grow in place.
local REWRITTEN = 12288

-- log_reader returns the functions that read entries, and log_rare the other functions that few
-- hits need. They are created on first use, because Lua creates functions in each call.
local log_reader

-- Returns the log at the current time. The fields are those of its record, or zeros. The last three
-- are the arguments.
function log_open(now, states, key, stored, till, units, oldest, first, length, room, head, tail, amount, period, bytes)
  local width = bytes + 4
  -- Most fields are listed here, because Lua reallocates a table that grows. Others are `ages`,
  -- `each`, `rows` and `asked`.
  local log = {
    now = now, states = states, key = key, stored = stored, amount = amount, period = period, newest = till - period,
    -- Converting the number to text takes longer than comparing it.
    format = bytes == 4 and '>I4I4' or bytes == 5 and '>I5I4' or '>I' .. bytes .. 'I4', width = width,
    instants = 256 ^ bytes, till = till, units = units, oldest = oldest, first = first, length = length, room = room,
    size = room * width, head = head, tail = tail, head_row = 0, tail_row = 0,
  }
  local is_sound = till > now and till < TWO_54 and length > 0 and length <= room
    and first < room and head * CHUNK < room and tail * CHUNK < room
  if room > CHUNK then
    local offset, newest = first % CHUNK, (first + length - 1) % room
    log.size = log.size + room / CHUNK * ROW
    log.head_row, log.tail_row = (first - offset) / CHUNK, (newest - newest % CHUNK) / CHUNK
    is_sound = is_sound and room % CHUNK == 0 and offset + length <= room
  end
  if not is_sound or log.size > LONGEST or now - oldest >= period and not log_reader().expire(log) then
    log.till, log.units, log.oldest, log.first, log.length, log.room = 0, 0, 0, 0, 0, 0
    log.size, log.head, log.tail, log.head_row, log.tail_row = 0, 0, 0, 0, 0
  end
  return log
end

-- Returns the microseconds until at most `units` are left in the window. For a lost log, returns
-- the microseconds until the oldest entry expires, because the next hit after that detects the
-- loss.
local function log_falls_to(log, units)
  local leaving, age = log.units - units, log.now - log.oldest
  if leaving <= 0 or log.length == 0 then
    return 0
  elseif leaving > 1 then
    local index = log_rare().pass(log, log.length, leaving)
    age = index and index < log.length and log_reader().entry(log, index) or age
  end
  if age < 0 then
    return log.period
  end
  return age < log.period and log.period - age or 1
end

-- Returns the units in the log, the microseconds until more units remain, and the microseconds
-- until the cost fits.
function log_status(log, cost)
  local units, amount, reset = log.units, log.amount, 0
  local remaining = units < amount and amount - units or 0
  if units > 0 then
    reset = log_falls_to(log, remaining < amount and amount - remaining - 1 or 0)
  end
  return units, reset, cost > remaining and log_falls_to(log, amount - cost) or 0
end

-- Adds a hit. Moves entries in the future, which exist if the clock has gone back, to now.
function log_add(log, cost)
  local now, units = log.now, cost
  local is_lost, is_in_place = false, log.length > 0 and log.newest >= now
  local is_again = is_in_place and log.newest == now
  -- The key outlives the log by an eighth of a period, so its expiry is set only once in an eighth
  -- of a period.
  local eighth = log.period / 8
  local this, other = now / eighth, log.newest / eighth
  local is_kept = this - this % 1 == other - other % 1 and not ARGV[NOW]
  local keep = (log.period + eighth) / 1000 + (ARGV[NOW] and 60000 or GRACE)
  keep = keep - keep % 1
  if is_in_place then
    local _, before
    if is_again then
      _, before = log_reader().entry(log, log.length - 1)
    else
      is_again, before = log_rare().cut(log)
    end
    is_lost, units = not before, (before or 0) + cost
    log_rare().try_rights(log, keep)
  end
  local length = is_again and log.length or log.length + 1
  if length == 1 then
    log.oldest = now
  end
  local entry = struct.pack(log.format, now % log.instants, units)
  local is_written = false
  if not is_lost and log.room > 0
    and length + (log.room > CHUNK and log.first % CHUNK or 0) > log.room then
    is_written = log.room < CHUNK
    is_lost = not log_rare().grow(log, entry, keep)
  end
  log.till, log.newest, log.units, log.length = now + log.period, now, log.units + cost, length
  if not is_lost and is_written then
    return
  end
  if not is_lost and log.room > 0 then
    local place = (log.first + length - 1) % log.room
    local offset = place % CHUNK
    local row, from = (place - offset) / CHUNK
    if row == log.tail_row then
      from = (log.tail * CHUNK + offset) * log.width
    else
      from = log_reader().at(log, place)
      log.tail, log.tail_row = from and (from / log.width - offset) / CHUNK, row
    end
    -- A write at the end of the string would give even a lost log the expected length. So the
    -- length is checked before.
    local is_there = from and (from + log.width < log.size or forgive('STRLEN', log.key) == log.size)
    if is_there and not is_kept then
      redis.call('PEXPIRE', log.key, keep)
    end
    if is_there and forgive('SETRANGE', log.key, from, entry) == log.size then
      if log.ages then
        log.ages[place], log.each[place] = 0, units
      end
      if offset == CHUNK - 1 and log.room > CHUNK then
        log_rare().complete(log)
      end
      return
    end
  end
  log.units, log.length, log.oldest, log.first, log.room, log.size = cost, 1, now, 0, 4, 4 * log.width
  log.head, log.tail, log.head_row, log.tail_row, log.ages = 0, 0, 0, 0, false
  entry = struct.pack(log.format, now % log.instants, cost)
  redis.call('SET', log.key, entry .. string.rep('\0', 3 * log.width), 'PX', keep)
end

local reader = false
function log_reader()
  if reader then
    return reader
  end

  -- Returns the offset of a place in the string, or nil if the log is lost.
  local function at(log, place)
    local offset = place % CHUNK
    local row, chunk, _ = (place - offset) / CHUNK
    if row == log.head_row then
      chunk = log.head
    elseif row == log.tail_row then
      chunk = log.tail
    else
      _, _, chunk = log_rare().row(log, row)
    end
    return chunk and (chunk * CHUNK + offset) * log.width
  end

  -- Returns the age of an entry and its units, or nothing if the log is lost. The age is negative
  -- if the clock has gone back. Reads the next entry too. `ages` and `each` cache the ages and
  -- units by place.
  local function entry(log, index)
    local place, ages, each = (log.first + index) % log.room, log.ages, log.each
    if not ages then
      ages, each = {}, {}
      log.ages, log.each = ages, each
    end
    local newest, age = log.newest, ages[place]
    local ahead = log.now - newest
    if not age then
      local width, last, from = log.width, place + 1, at(log, place)
      if last == log.room or last % CHUNK == 0 then
        last = place
      end
      local length = (last + 1 - place) * width
      local bytes = from and forgive('GETRANGE', log.key, from, from + length - 1)
      if not bytes or #bytes ~= length then
        return
      end
      for other = place, last do
        local instant, units = struct.unpack(log.format, bytes, (other - place) * width + 1)
        -- No entry is later than the newest.
        ages[other], each[other] = ahead + (newest - instant) % log.instants, units
      end
      age = ages[place]
    end
    if age - ahead < log.period then
      return age, each[place]
    end
  end

  -- Returns the index of the first entry whose age matches, the length if none matches, or nil if
  -- the log is lost. All entries after a match must match. This is a binary search, but it tries
  -- the first two entries first, because one of them is nearly always the result.
  local function search(log, is_so)
    local low, high = 0, log.length
    while low < high do
      local middle = low < 2 and low or math.floor((low + high) / 2)
      local age = entry(log, middle)
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

  -- Removes expired entries. Returns false if no entry is left or the log is lost.
  local function expire(log)
    local expired = search(log, function(age) return age < log.period end)
    if not expired or expired == log.length then
      return false
    elseif expired > 0 then
      local _, gone
      if expired == 1 then
        _, gone = entry(log, 0)
      else
        _, gone = log_rare().pass(log, expired, math.huge)
      end
      if not gone or gone >= log.units then
        return false
      end
      log.first, log.length, log.units = (log.first + expired) % log.room, log.length - expired, log.units - gone
      local age, units = entry(log, 0)
      if units == 0 then
        log_rare().skip(log)
        age = entry(log, 0)
      end
      local offset = log.first - log.head_row * CHUNK
      if not age or (offset < 0 or offset >= CHUNK) and not log_rare().locate(log) then
        return false
      end
      log.oldest = log.now - age
    end
    return true
  end

  reader = { at = at, entry = entry, search = search, expire = expire }
  return reader
end

local rare = false
function log_rare()
  if rare then
    return rare
  end
  local log_at, log_entry, log_search = log_reader().at, log_reader().entry, log_reader().search

  -- Returns a row (the sum, the number of entries, and the chunk's position), or nothing if the log
  -- is lost. The first few rows are read one by one. After that, the whole table is read at once.
  local function row(log, number)
    local from, bytes, at = log.room * log.width, log.rows, number * ROW
    if not bytes and (log.asked or 0) < 4 then
      log.asked = (log.asked or 0) + 1
      bytes, at = forgive('GETRANGE', log.key, from + at, from + at + ROW - 1), 0
    elseif not bytes then
      log.rows = forgive('GETRANGE', log.key, from, log.size - 1)
      bytes = log.rows
    end
    if bytes and #bytes >= at + ROW then
      local sum, many, chunk = struct.unpack('>I4I2I4', bytes, at + 1)
      if many <= CHUNK and chunk * CHUNK < log.room then
        return sum, many, chunk
      end
    end
  end

  local function write_row(log, number, sum, many, chunk)
    local bytes = struct.pack('>I4I2I4', sum % TWO_32, many, chunk)
    redis.call('SETRANGE', log.key, log.room * log.width + number * ROW, bytes)
    log.rows = false
  end

  -- Looks up the chunks of the first and of the last entry. Returns nil if the log is lost.
  local function locate(log)
    local head, tail = math.floor(log.first / CHUNK), math.floor((log.first + log.length - 1) % log.room / CHUNK)
    if log.room > CHUNK then
      local _
      _, _, log.head = row(log, head)
      _, _, log.tail = row(log, tail)
      log.head_row, log.tail_row = head, tail
    end
    return log.head and log.tail
  end

  -- Returns the bytes of `count` entries, or nil if the log is lost. In a log of several chunks,
  -- the entries must be in one chunk.
  local function read(log, index, count)
    local place = (log.first + index) % log.room
    local straight, from = math.min(count, log.room - place), log_at(log, place)
    local bytes = from and forgive('GETRANGE', log.key, from, from + straight * log.width - 1) or ''
    if straight < count then
      bytes = bytes .. (forgive('GETRANGE', log.key, 0, (count - straight) * log.width - 1) or '')
    end
    return #bytes == count * log.width and bytes or nil
  end

  -- Returns the units of `count` entries from an offset on, and the position after them.
  -- The size of Lua's stack limits `count`.
  local function units_of(log, bytes, from, count)
    local format = string.rep(string.rep('x', log.width - 4) .. 'I4', count)
    return { struct.unpack('>' .. format, bytes, from * log.width + 1) }
  end

  -- Adds up the units of the oldest entries, of at most `count` entries, while the sum is less than
  -- `enough`. Returns the number of entries and the sum, or nothing if the log is lost.
  local function pass(log, count, enough)
    local index, passed = 0, 0
    while index < count do
      local place = (log.first + index) % log.room
      local step = math.min(CHUNK - place % CHUNK, log.room - place, count - index)
      local sum = step == CHUNK and log.room > CHUNK and row(log, place / CHUNK)
      if sum and passed + sum < enough then
        index, passed = index + step, passed + sum
      else
        step = math.min(step, 32)
        local bytes = read(log, index, step)
        if not bytes then
          return
        end
        local each = units_of(log, bytes, 0, step)
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

  -- Skips the places without units at the front. They fill the rest of a chunk.
  local function skip(log)
    local rest = math.min(CHUNK - log.first % CHUNK, log.length - 1)
    log.first, log.length = (log.first + rest) % log.room, log.length - rest
  end

  -- Removes places without units at the end. Returns nil if the log is lost.
  local function trim(log)
    if log.room > CHUNK and log.length > 0 then
      local place = (log.first + log.length - 1) % log.room
      local age, units = log_entry(log, log.length - 1)
      if units == 0 then
        local _, many = row(log, math.floor(place / CHUNK))
        log.length = many and math.max(log.length - (place % CHUNK + 1 - many), 0)
        return many
      end
      return age
    end
    return true
  end

  -- Removes the entries in the future and the one at now. Returns true if there is one at now, and
  -- the units of all removed entries. If the log is lost, returns false and no units.
  local function cut(log)
    local past = log_search(log, function(age) return age < 0 end)
    if past then
      log.length = past
    end
    if not past or not trim(log) then
      log.length = 0
      return false
    end
    local is_again = log.length > 0 and log_entry(log, log.length - 1) == 0
    local _, before = pass(log, is_again and log.length - 1 or log.length, math.huge)
    if not before or before > log.units then
      return false
    end
    local ahead = log.units - before
    return is_again, ahead
  end

  -- Runs each command that follows, so that a missing right is detected before an entry is changed
  -- in place. A new entry does not need this check, because nothing reads it until the small states
  -- are written, which happens last.
  local function try_rights(log, keep)
    if keep then
      redis.call('PEXPIRE', log.key, keep)
    end
    forgive('STRLEN', log.key)
    forgive('GETRANGE', log.key, 0, 0)
    -- An empty write changes nothing.
    forgive('SETRANGE', log.key, 0, '')
    redis.call('SET', log.states, log.stored, 'KEEPTTL')
  end

  -- Writes the row of the last chunk. It is called when the last place of the chunk is in use.
  local function complete(log)
    local sum, from = 0, log.tail * CHUNK * log.width
    local bytes = redis.call('GETRANGE', log.key, from, from + CHUNK * log.width - 1)
    -- Four entries at a time without a table take half the time of `units_of`.
    local unpack, format = struct.unpack, '>' .. string.rep('I' .. log.width - 4 .. 'I4', 4)
    for at = 1, CHUNK * log.width, 4 * log.width do
      local _, a, _, b, _, c, _, d = unpack(format, bytes, at)
      sum = sum + a + b + c + d
    end
    write_row(log, log.tail_row, sum, CHUNK, log.tail)
  end

  -- Adds places to a full ring. To a ring of less than a chunk, also adds the entry. Returns false
  -- if the log is lost.
  local function grow(log, entry, keep)
    local room, width = log.room, log.width
    if room < CHUNK then
      -- A short log is rewritten, which takes no more memory than the log itself.
      local bytes = forgive('GET', log.key)
      if not bytes or #bytes ~= log.size then
        return false
      end
      if KEYS[3] then
        -- With several keys, a command on another one could fail after this one is written.
        try_rights(log, keep)
      end
      log.room = math.min(math.max(math.min(room * 2, log.amount), room + 1), CHUNK)
      log.size = log.room * width
      bytes = string.sub(bytes, log.first * width + 1) .. string.sub(bytes, 1, log.first * width) .. entry
      redis.call('SET', log.key, bytes .. string.rep('\0', log.size - #bytes), 'PX', keep)
      log.first = 0
    elseif forgive('STRLEN', log.key) ~= log.size then
      return false
    else
      -- A long log gets more chunks at the end of the string. Their rows are inserted before the
      -- row of the first entry. A log of one chunk gets its row, and begins at the first place.
      local rows, old
      if room == CHUNK then
        local _, sum = pass(log, CHUNK, math.huge)
        old = read(log, 0, CHUNK)
        if not old or not sum then
          return false
        end
        rows, log.first = struct.pack('>I4I2I4', sum, CHUNK, 0), 0
      else
        rows = forgive('GETRANGE', log.key, room * width, -1)
        old = room < REWRITTEN and forgive('GETRANGE', log.key, 0, room * width - 1)
      end
      try_rights(log, keep)
      local count, first = room / CHUNK, math.floor(log.first / CHUNK)
      -- Without refunds, two chunks more than the limit needs suffice.
      local enough = math.max(math.ceil(log.amount / CHUNK) + 2 - count, 1)
      local more, new = math.min(math.ceil(count / 4), 64, enough), ''
      for chunk = count, count + more - 1 do
        new = new .. struct.pack('>I4I2I4', 0, 0, chunk)
      end
      if first > 0 then
        rows = string.sub(rows, 1, first * ROW) .. new .. string.sub(rows, first * ROW + 1)
        log.first, log.head_row = log.first + more * CHUNK, log.head_row + more
      else
        rows = rows .. new
      end
      log.room = room + more * CHUNK
      log.size = log.room * width + #rows
      if old then
        redis.call('SET', log.key, old .. string.rep('\0', more * CHUNK * width) .. rows, 'PX', keep)
      else
        redis.call('SETRANGE', log.key, log.room * width, rows)
      end
    end
    log.ages, log.rows = false, false
    return true
  end

  -- Moves entries in the future to now. Returns true if the log has changed.
  local function settle(log)
    local length = log.length
    if length == 0 then
      return false
    end
    local _, ahead = cut(log)
    log.length = length
    if ahead then
      log_add(log, 0)
    end
    return ahead
  end

  rare = {
    row = row, write_row = write_row, locate = locate, read = read, pass = pass, skip = skip, trim = trim, cut = cut,
    try_rights = try_rights, complete = complete, grow = grow, settle = settle,
  }
  return rare
end

-- Only for settling.

-- Removes the row of an inner chunk, by its number counted from the first chunk. The chunk is free
-- after that.
local function log_drop(log, number)
  local from, first = log.room * log.width, math.floor(log.first / CHUNK) * ROW
  local rows = redis.call('GETRANGE', log.key, from, -1)
  rows = string.sub(rows, first + 1) .. string.sub(rows, 1, first)
  local cut = number * ROW
  rows = string.sub(rows, 1, cut) .. string.sub(rows, cut + ROW + 1) .. string.sub(rows, cut + 1, cut + ROW)
  redis.call('SETRANGE', log.key, from, string.sub(rows, #rows - first + 1) .. string.sub(rows, 1, #rows - first))
  log.length, log.rows, log.head_row, log.tail_row = log.length - CHUNK, false, -1, -1
end

-- Writes the entries of an inner chunk, from a place on, and fills the places after them.
local function log_fill(log, chunk, at, entries)
  local last = string.sub(entries, -log.width, -5) .. '\0\0\0\0'
  local missing = CHUNK - at - #entries / log.width
  redis.call('SETRANGE', log.key, (chunk * CHUNK + at) * log.width, entries .. string.rep(last, missing))
end

-- Moves the entries of the next chunk into this one, if both are inner chunks and the entries fit.
local function log_join(log, number)
  local count, last = log.room / CHUNK, math.floor((log.first % CHUNK + log.length - 1) / CHUNK)
  if number < 0 or number + 1 >= last or number == 0 and log.first % CHUNK > 0 then
    return
  end
  local row = (math.floor(log.first / CHUNK) + number) % count
  local sum, many, chunk = log_rare().row(log, row)
  local other_sum, others, other = log_rare().row(log, (row + 1) % count)
  if chunk and other and many + others <= CHUNK then
    local from = other * CHUNK * log.width
    local entries = redis.call('GETRANGE', log.key, from, from + others * log.width - 1)
    log_fill(log, chunk, many, entries)
    log_rare().write_row(log, row, sum + other_sum, many + others, chunk)
    log_drop(log, number + 1)
  end
end

-- Takes units from an entry, and removes an entry without units. Returns false if the log is lost.
local function log_take(log, index, units, taken)
  local place = (log.first + index) % log.room
  local from, offset, number, last, row, sum, many, chunk = log_reader().at(log, place), place % CHUNK, 0, 0
  if log.room > CHUNK then
    number = math.floor((log.first % CHUNK + index) / CHUNK)
    last = math.floor((log.first % CHUNK + log.length - 1) / CHUNK)
    row = math.floor(place / CHUNK)
    sum, many, chunk = log_rare().row(log, row)
    if not chunk then
      return false
    end
  end
  local is_between = number < last and (number > 0 or log.first % CHUNK == 0)
  if taken < units then
    redis.call('SETRANGE', log.key, from + log.width - 4, struct.pack('>I4', units - taken))
    if row then
      log_rare().write_row(log, row, sum - taken, many, chunk)
    end
  elseif index == 0 and not is_between or number < last and not is_between then
    -- The first chunk is partly expired. The entries before this one move forward by one place.
    if index > 0 then
      redis.call('SETRANGE', log.key, log_reader().at(log, log.first) + log.width, log_rare().read(log, 0, index))
    end
    log.first, log.length, log.ages = (log.first + 1) % log.room, log.length - 1, false
    local _, left = nil, 1
    if log.length > 0 then
      _, left = log_reader().entry(log, 0)
    end
    if left == 0 then
      log_rare().skip(log)
    end
  elseif not is_between then
    -- In the last chunk, the entries after this one move back by one place.
    local behind = log.length - 1 - index
    if behind > 0 then
      local bytes, straight = log_rare().read(log, index + 1, behind), log.room - place
      redis.call('SETRANGE', log.key, from, string.sub(bytes, 1, straight * log.width))
      if straight < behind then
        redis.call('SETRANGE', log.key, 0, string.sub(bytes, straight * log.width + 1))
      end
    end
    log.length, log.ages = log.length - 1, false
    log_rare().trim(log)
  elseif many == 1 then
    log_drop(log, number)
  else
    local base = chunk * CHUNK * log.width
    local entries = redis.call('GETRANGE', log.key, base, base + many * log.width - 1)
    entries = string.sub(entries, 1, offset * log.width) .. string.sub(entries, (offset + 1) * log.width + 1)
    log_fill(log, chunk, 0, entries)
    log_rare().write_row(log, row, sum - units, many - 1, chunk)
    log_join(log, number)
    log_join(log, number - 1)
  end
  log.ages, log.units = false, math.max(log.units - taken, 0)
  return true
end

-- Adds units that may exceed the amount. The log counts up to 2^32 - 1 units.
function log_charge(log, cost)
  cost = math.min(cost, 4294967295 - log.units)
  if cost > 0 then
    log_add(log, cost)
  end
end

-- Refunds a hit. Returns true if the log has changed.
function log_take_back(log, made, cost)
  local age = log.now - made
  if log.length == 0 or forgive('STRLEN', log.key) ~= log.size then
    return false
  end
  local index = log_reader().search(log, function(other) return other <= age end)
  if not index or index == log.length then
    return false
  end
  local same, units = log_reader().entry(log, index)
  if same ~= age or units == 0 then
    return false
  end
  log_rare().try_rights(log)
  if not log_take(log, index, units, math.min(cost, units)) then
    return false
  end
  local oldest, newest
  if log.length > 0 and log_rare().locate(log) then
    oldest, newest = log_reader().entry(log, 0), log_reader().entry(log, log.length - 1)
  end
  if not oldest or not newest then
    -- The log is empty. SET makes it expire at once, because the right to run SET has been checked.
    redis.call('SET', log.key, '', 'PX', 1)
    log.till = 0
    return true
  end
  log.oldest, log.newest = log.now - oldest, log.now - newest
  log.till = log.newest + log.period
  return true
end
