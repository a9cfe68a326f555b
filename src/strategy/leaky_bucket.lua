-- LeakyBucket. Arguments: a bucket's.

twins['leaky-bucket'] = {
  -- Also answers how long the hit has to wait: until all that was owed before is paid.
  hit = function(now, cost, till, early, anchor, at)
    return bucket_hit(now, till, early, anchor, at)
  end,

  -- Only the last place can be given back.
  refund = function(now, cost, till, early, anchor, at, hit)
    if till == hit.till then
      return bucket_refund(now, till, early, anchor, at, hit)
    end
  end,
}
