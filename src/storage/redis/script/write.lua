-- Writes the small states. The key expires when the last of them is no longer needed.
--
-- The expiry is computed from the end of the last state, rounded up to a multiple of STEP. If the
-- rounded end has not changed, the key keeps its expiry. Setting the expiry takes longer. A test's
-- clock can be slower than the server's, so the key then stays a minute longer.
if changed then
  local latest, before = now, stored
  -- each small:
  if till$ > latest then
    latest = till$
  end
  -- each log:
  if log$.till > latest then
    latest = log$.till
  end
  -- done
  -- pack
  if others then
    -- Keeps the states of other limits in the same key until they expire.
    local at, after, till, found, dropped = 1
    while at + 19 <= #before do
      found, till = unpack('>I4I8', before, at)
      after = at + (found < 2147483648 and 20 or 44)
      dropped = till <= now
      -- each:
      dropped = dropped or found == DIGEST$
      -- done
      if not dropped then
        stored = stored .. string.sub(before, at, after - 1)
        if till > latest then
          latest = till
        end
      end
      at = after
    end
  end
  if latest <= now then
    -- remove
  elseif not others and last - last % STEP == latest - latest % STEP and not OWN then
    -- overwrite
  else
    local keep = (latest - latest % STEP + STEP - now) / 1000 + (OWN and 60000 or GRACE)
    -- `%d` is limited to 32 bits on some systems.
    call('SET', STATES, stored, 'PX', keep < 2147483648 and string.format('%d', keep) or keep - keep % 1)
  end
end
