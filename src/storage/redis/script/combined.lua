-- Decides on several hits, in their order.
--
-- KEYS: the keys of the small states of each hit.
-- ARGV: the packed arguments of each hit. In tests, the time follows.
--
-- Returns for each hit the string of hit.lua, or false if the hit failed. A hit that failed has
-- written nothing, because the small states are written last.
local own = ARGV[#KEYS + 1]
-- begin
local function decide(PARAMETERS)
  -- body
end
local answers, protected = {}, pcall
for at = 1, #KEYS, COUNT do
  local is_done, answer = protected(decide, VALUES)
  answers[#answers + 1] = is_done and type(answer) == 'string' and answer
end
return answers
