-- Decides on a hit. It takes units from the limits only if all limits admit it.
--
-- Returns the time, 1 if the hit is admitted or else 0, and the records of the small states. For each
-- limit that delays, the delay follows, and for each log the results of log_status.
-- read
local admitted, steady = 1, not others
-- each small:
local new_till$, new_first$, new_second$, delay$, ahead$ = NAME$_hit(now, cost, till$, first$, second$, ARGUMENTS$)
if not new_till$ then
  admitted = 0
end
-- each log:
if log$.units + cost > log$.amount then
  admitted = 0
end
-- done

local changed, forgotten, a, b = admitted == 1
if changed then
  -- each small:
  if new_till$ ~= till$ then
    steady = false
  end
  till$, first$, second$ = new_till$, new_first$, new_second$
  -- each log:
  log_add(log$, cost)
  -- done
else
  -- each that counts refusals:
  if till$ > now then
    forgotten, a, b = NAME$_refuse(now, till$, first$, second$, ARGUMENTS$)
    if forgotten then
      till$, first$, second$, steady, changed = forgotten, a, b, false, true
    end
  end
  -- each that does not:
  if ahead$ then
    forgotten, a, b = NAME$_refuse(now, till$, first$, second$, ARGUMENTS$)
    if forgotten then
      till$, first$, second$, steady, changed = forgotten, a, b, false, true
    end
  end
  -- each log:
  if log$.newest > now and log_settle(log$) then
    changed = true
  end
  -- done
end

-- write
local units, reset, retry
local answer = { now, admitted, stored }
-- each that delays:
answer[#answer + 1] = delay$ or 0
-- each log:
units, reset, retry = log_status(log$, admitted == 0 and cost or 0)
answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = units, reset, retry
-- done
return answer
