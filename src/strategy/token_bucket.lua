-- TokenBucket. Arguments: a bucket's.

function token_bucket_hit(now, cost, till, early, anchor, at)
  till, early, anchor = bucket_hit(now, till, early, anchor, at)
  return till, early, anchor, 0
end

-- Only for refunds.

function token_bucket_refund(now, cost, till, early, anchor, at, hit)
  return bucket_refund(now, till, early, anchor, at, hit)
end
