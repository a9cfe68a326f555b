-- The script of TokenBucket. The arguments are those of bucket.lua.

token_bucket_hit = bucket_hit
token_bucket_refuse = bucket_refuse

-- Only for settling.

token_bucket_charge = bucket_charge
token_bucket_refund = bucket_refund
