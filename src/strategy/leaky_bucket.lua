-- LeakyBucket. Arguments: a bucket's.

-- Also answers how long the hit has to wait: until all that was owed before is paid.
function leaky_bucket_hit(now, cost, till, early, anchor, at)
  return bucket_hit(now, till, early, anchor, at)
end

-- Only for refunds.

-- Only the last place can be given back.
function leaky_bucket_refund(now, cost, till, early, anchor, at, hit)
  if till == hit.till then
    return bucket_refund(now, till, early, anchor, at, hit)
  end
end
