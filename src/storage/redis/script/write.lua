-- Writes the small states. The key expires when the last of them is no longer needed.
--
-- An instant is formatted in two parts, because `%d` is limited to 32 bits on some systems. That is
-- still four times as fast as `%.0f`.
if changed then
  local latest, steady, texts = now, true, ''
  -- each small:
  if till$ > now then
    if text$ then
      texts = texts .. format('%s%s,%u,%u]', ARGV[AT$], text$, first$, second$)
    else
      texts = texts .. format('%s%d%08d,%u,%u]', ARGV[AT$], till$ / 100000000, till$ % 100000000, first$, second$)
      steady = false
    end
    if till$ > latest then
      latest = till$
    end
  else
    steady = false
  end
  -- each log:
  if log$.till > now then
    texts = texts .. log_text(log$, ARGV[AT$])
    if log$.till > latest then
      latest = log$.till
    end
  end
  steady = false
  -- done
  if known < #stored then
    -- Keeps the states of other limits in the same key until they expire.
    steady = false
    local own = {}
    -- each:
    own[ARGV[AT$]] = true
    -- done
    for tag, till, rest in string.gmatch(stored, '(%[[^%[%] ]* )(%d+)(,[^%[%]]*%])') do
      local forgotten = till + 0
      if not own[tag] and forgotten > now and forgotten < TWO_54 then
        texts = texts .. tag .. till .. rest
        if forgotten > latest then
          latest = forgotten
        end
      end
    end
  end
  stored = texts
  if latest <= now then
    call('UNLINK', KEYS[1])
  elseif steady and not ARGV[NOW] then
    -- All ends are unchanged, so the key keeps its expiry.
    call('SET', KEYS[1], texts, 'KEEPTTL')
  else
    local keep = (latest - now) / 1000 + GRACE
    call('SET', KEYS[1], texts, 'PX', keep < 2147483648 and format('%d', keep) or keep - keep % 1)
  end
end
