-- TokenBucket. Arguments: a bucket's.

twins['token-bucket'] = {
  hit = function(now, cost, till, early, anchor, at)
    till, early, anchor = bucket_hit(now, till, early, anchor, at)
    return till, early, anchor, 0
  end,

  refund = function(now, cost, till, early, anchor, at, hit)
    return bucket_refund(now, till, early, anchor, at, hit)
  end,
}
