-- The script of ElasticWindow. Arguments: the amount, and the period in microseconds.

function elastic_window_hit(now, cost, till, count, anchor, amount, period)
  if count == 0 or till <= now then
    count, anchor = 0, now % 4294967296
  end
  if count + cost <= amount then
    return now + period, count + cost, anchor, 0
  end
end

function elastic_window_refuse(now, till, count, anchor, amount, period)
  if count > 0 and till > now then
    return now + period, count, anchor
  end
end

-- Only for settling.

function elastic_window_charge(...)
  return window_charge(elastic_window_hit, ...)
end

function elastic_window_refund(now, cost, till, count, anchor, hit, amount, period)
  return window_refund(cost, math.min(till, now + period), count, anchor, hit)
end
