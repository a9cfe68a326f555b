-- Gives a hit back, to each limit that has not forgotten it. What each limit needs ends with the instant from which it has, and
-- its anchor; the cost is followed by the time of the hit. Answers the time.
-- read
local changed, forgotten, a, b = false
-- each small:
if now < ARGV[HIT$] + 0 and till$ > now then
  forgotten, a, b = NAME$_refund(now, cost, till$, first$, second$, AT$ + 1,
    { at = ARGV[2] + 0, till = ARGV[HIT$] + 0, anchor = ARGV[HIT$ + 1] + 0 })
  if forgotten then
    till$, first$, second$, text$, changed = forgotten, a, b, nil, true
  end
end
-- each log:
if now < ARGV[HIT$] + 0 and log_take_back(log$, ARGV[2] + 0, cost) then
  changed = true
end
-- done
-- write
return { now }
