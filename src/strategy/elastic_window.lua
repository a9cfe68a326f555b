-- ElasticWindow. Arguments: amount, period.

twins['elastic-window'] = {
  hit = function(now, cost, till, count, anchor, at)
    if count == 0 or till <= now then
      count, anchor = 0, now % 4294967296
    end
    if count + cost <= tonumber(ARGV[at]) then
      return now + ARGV[at + 1], count + cost, anchor, 0
    end
  end,

  refuse = function(now, till, count, anchor, at)
    if count > 0 and till > now then
      return now + ARGV[at + 1], count, anchor
    end
  end,

  refund = function(now, cost, till, count, anchor, at, hit)
    if count > 0 and anchor == hit.anchor then
      if count <= cost then
        return 0, 0, 0
      end
      return math.min(till, now + ARGV[at + 1]), count - cost, anchor
    end
  end,
}
