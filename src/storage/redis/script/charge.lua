-- Charges units to all limits, even if fewer remain. Returns the same values as hit.lua after a
-- refusal, but the byte is 1.
-- begin
-- read
local changed, a, b, c = true
-- each small:
a, b, c = NAME$_charge(now, cost, till$, first$, second$, ARGUMENTS$)
till$, first$, second$ = a, b, c
-- done
-- each log:
log_charge(log$, cost)
-- done
-- write
cost = 0
-- answer
