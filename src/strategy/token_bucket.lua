-- The script of TokenBucket. The arguments are those of bucket.lua.

function token_bucket_hit(now, cost, till, early, mark, at)
  local ahead, _
  till, early, mark, _, ahead = bucket_hit(now, till, early, mark, at)
  return till, early, mark, 0, ahead
end

token_bucket_refuse = bucket_refuse

-- Only for settling.

token_bucket_charge = bucket_charge

function token_bucket_refund(now, cost, till, early, mark, at, hit)
  return bucket_refund(now, till, early, mark, at, hit)
end
