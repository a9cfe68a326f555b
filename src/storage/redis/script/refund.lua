-- Refunds units of a hit to each limit whose state still contains it. Returns 1.
--
-- The cost is the units to be refunded, and `made` is the time of the hit. For each limit, `UNTIL$`
-- is the instant until which its state contains the hit, and `ANCHOR$` the anchor of that state.
-- begin
-- read
local changed, forgotten, a, b = false
-- each small:
if now < UNTIL$ and till$ > now then
  forgotten, a, b =
    NAME$_refund(now, cost, till$, first$, second$, { at = made, till = UNTIL$, anchor = ANCHOR$ }, ARGUMENTS$)
  if forgotten then
    till$, first$, second$, changed = forgotten, a, b, true
  end
end
-- done
-- each log:
if now < UNTIL$ and log_take_back(log$, made, cost) then
  changed = true
end
-- done
-- write
return 1
