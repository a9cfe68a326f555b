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

function elastic_window_charge(now, cost, till, count, anchor, amount, period)
  if count == 0 or till <= now then
    count, anchor = 0, now % 4294967296
  end
  return now + period, math.min(count + cost, 4294967295), anchor
end

function elastic_window_refund(now, cost, till, count, anchor, hit, amount, period)
  if count > 0 and anchor == hit.anchor then
    if count <= cost then
      return 0, 0, 0
    end
    return math.min(till, now + period), count - cost, anchor
  end
end
