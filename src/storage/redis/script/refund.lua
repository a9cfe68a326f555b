-- Refunds units of a hit to each limit whose state still contains it. Returns the time.
--
-- ARGV: the cost is the units to be refunded. The time of the hit follows it. The arguments of each limit end with the instant until
-- which its state contains the hit, and the anchor of that state.
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
