-- Forgets all limits, and no others that stand under the same name.
-- read
local changed = true
-- each small:
till$ = 0
-- each log:
log$.till = 0
redis.call('UNLINK', KEYS[KEY$])
-- done
-- write
return { now }
