-- The script of LeakyBucket. The arguments are those of bucket.lua.

-- The fourth value is the delay of the hit: the debt before it.
function leaky_bucket_hit(now, cost, till, early, mark, at)
  return bucket_hit(now, till, early, mark, at)
end

leaky_bucket_refuse = bucket_refuse

-- Only for settling.

leaky_bucket_charge = bucket_charge

-- Refunds only the last hit, because later hits already wait behind any other one.
function leaky_bucket_refund(now, cost, till, early, mark, at, hit)
  if till == hit.till then
    return bucket_refund(now, till, early, mark, at, hit)
  end
end
