-- Decides on a hit. It takes units from the limits only if all limits admit it. With several keys,
-- the steps between `-- next` are made for each of them before the next step.
--
-- Returns a string, because a table would cost the server more. Its parts are:
--
-- 1. The time.
-- 2. A byte that is 1 if the hit is admitted, and 0 otherwise. With several keys, it is 2 if these
--    limits admit the hit, but those of another key refuse it.
-- 3. For each limit that delays, the delay. For each log, the results of log_status, but only if
--    the hit is not admitted. After an admission, the record of the log has these numbers.
-- 4. The value of the key, which contains the records of the limits.
-- begin
-- read
local admitted = 1
-- each small:
local new_till$, new_first$, new_second$, delay$, ahead$ = NAME$_hit(now, cost, till$, first$, second$, ARGUMENTS$)
-- each that keeps:
if new_till$ and not NAME$_hit(now, NEEDED$, till$, first$, second$, FOR_NEEDED$) then
  new_till$ = nil
end
-- each small:
if not new_till$ then
  admitted = 0
end
-- each log:
if log$.units + NEEDED$ > log$.amount then
  admitted = 0
end
-- done
-- next
local changed, forgotten, a, b = admitted == 1
if changed then
  -- each small:
  till$, first$, second$ = new_till$, new_first$, new_second$
  -- each log:
  log_add(log$, cost)
  -- done
elseif admitted == 0 then
  -- each small:
  if MAY_CHANGE$ then
    forgotten, a, b = NAME$_refuse(now, till$, first$, second$, ARGUMENTS$)
    if forgotten then
      till$, first$, second$, changed = forgotten, a, b, true
    end
  end
  -- each log:
  if log$.newest > now and log_rare().settle(log$) then
    changed = true
  end
  -- done
end

-- A wrong delay of a strategy ends the script here, before the hit is counted.
-- each that delays:
delay$ = pack('>I8', delay$ or 0)
-- done
-- next
-- write
-- next
local answer = pack('>I8B', now, admitted)
-- each that delays:
answer = answer .. delay$
-- each log:
if admitted ~= 1 then
  answer = answer .. pack('>I8I8I8', log_status(log$, NEEDED$))
end
-- done
return answer .. stored
