-- The script of LeakyBucket. The arguments are those of bucket.lua.

-- The fourth value of a hit is its delay: the debt before it.
leaky_bucket_hit = bucket_hit
leaky_bucket_refuse = bucket_refuse

-- Only for settling.

leaky_bucket_charge = bucket_charge

-- Refunds only the last hit, because later hits already wait behind any other one.
function leaky_bucket_refund(now, cost, till, early, mark, hit, amount, full, full_part, span, span_part, largest)
  if till == hit.till then
    return bucket_refund(now, cost, till, early, mark, hit, amount, full, full_part, span, span_part, largest)
  end
end
