-- Charges units to all limits, whatever remains. Returns the same values as hit.lua.
-- read
local changed, steady, a, b, c = true, false
-- each small:
a, b, c = NAME$_charge(now, cost, till$, first$, second$, ARGUMENTS$)
till$, first$, second$ = a, b, c
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
