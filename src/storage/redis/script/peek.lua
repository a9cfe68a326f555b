-- Reads the states without a change. Returns the same values as hit.lua.
-- read
local units, reset, retry
local answer = { now, 1, stored }
-- each that delays:
answer[#answer + 1] = 0
-- each log:
units, reset, retry = log_status(log$, cost)
answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = units, reset, retry
-- done
return answer
