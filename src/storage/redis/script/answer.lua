-- Returns the same values as hit.lua after a refusal, but the byte is 1 and the delays are 0.
local answer = pack('>I8B', now, 1)
-- each that delays:
answer = answer .. pack('>I8', 0)
-- each log:
answer = answer .. pack('>I8I8I8', log_status(log$, NEEDED$))
-- done
return answer .. stored
