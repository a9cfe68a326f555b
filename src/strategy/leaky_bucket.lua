-- LeakyBucket. Arguments: a bucket's.

-- Also answers how long the hit has to wait: until all that was owed before is paid.
function leaky_bucket_hit(now, cost, till, early, mark, at)
  return bucket_hit(now, till, early, mark, at)
end

leaky_bucket_refuse = bucket_refuse

-- Only for refunds.

-- Only the last place can be given back.
function leaky_bucket_refund(now, cost, till, early, mark, at, hit)
  if till == hit.till then
    return bucket_refund(now, till, early, mark, at, hit)
  end
end
