-- Clears the states of these limits. States of other limits in the same key are kept. A value of
-- an unknown format is deleted.
-- begin
-- read
local changed = true
-- each small:
till$, first$, second$ = 0, 0, 0
-- each log:
log$.till = 0
redis.call('UNLINK', KEYS[KEY$])
-- done
-- write
return 1
