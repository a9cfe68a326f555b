-- Charges units to all limits, whatever remains. Returns the same values as hit.lua.
-- read
local changed, a, b, c = true
-- each small:
a, b, c = NAME$_charge(now, cost, till$, first$, second$, AT$ + 1)
till$, first$, second$, text$ = a, b, c, nil
-- each log:
log_charge(log$, cost)
-- done
-- write
local units, reset, retry
local answer = { now, 1, stored }
-- each that delays:
answer[#answer + 1] = 0
-- each log:
units, reset, retry = log_status(log$, 0)
answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = units, reset, retry
-- done
return answer
