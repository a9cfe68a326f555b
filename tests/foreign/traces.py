"""Replays what the tests of the Python package `limits` expect, on this package and on the example server.

The traces are facts of its `tests/test_strategy.py`. They take real time, so a trace that was late is
repeated.
"""

import concurrent.futures
import http.client
import itertools
import sys
import time

import limits
from limits import storage, strategies

import servers

STRATEGIES = {
    "fixed-window": strategies.FixedWindowRateLimiter,
    "moving-window": strategies.MovingWindowRateLimiter,
    "sliding-window-counter": strategies.SlidingWindowCounterRateLimiter,
}
# A step that begins this many seconds after its time is late.
LATE = 0.04
ATTEMPTS = 5
PREFIXES = itertools.count()
REDIS = storage.RedisStorage(f"redis://127.0.0.1:{servers.redis()}")


def hits(at, count, key="a", cost=1):
    return [(at, key, "hit", cost, True)] * count


def refused(at, key="a", cost=1):
    return [(at, key, "hit", cost, False)]


def left(at, units, reset=None, key="a"):
    """Expects this number of remaining units, and the seconds until the reset."""
    return [(at, key, "stats", units, reset)]


def clear(at):
    return [(at, "a", "clear", None, None)]


COSTS = refused(0, "k1", 11) + hits(0, 1, "k2", 5) + left(0, 5, None, "k2") + refused(0, "k2", 6)
TWO_AN_HOUR = hits(0, 2) + refused(0)


def once_more(at):
    """One unit of the previous window has left."""
    return left(at, 1) + hits(at, 1) + left(at, 0) + refused(at)


# On Redis, `limits` reports a reset of 0 in the millisecond of the first hit, because it takes the time to
# live, which is two periods, modulo one period. So the numbers of a window are read 10 ms later.
TRACES = [
    ("fixed window", "fixed-window", 10, "2 second", left(0, 10) + hits(0, 10) + refused(0) + left(0, 0, 2)),
    ("fixed window, costs", "fixed-window", 10, "2 minute", COSTS),
    ("fixed window, two hits", "fixed-window", 2, "1 hour", TWO_AN_HOUR),
    (
        "sliding window counter",
        "sliding-window-counter",
        10,
        "2 second",
        left(0, 10) + hits(0, 10) + refused(0) + left(0.02, 0, 2),
    ),
    (
        "sliding window counter, total reset",
        "sliding-window-counter",
        10,
        "1 second",
        left(0, 10) + hits(0, 1, cost=10) + refused(0) + left(0, 0) + left(2.1, 10, 0),
    ),
    (
        "sliding window counter, current window",
        "sliding-window-counter",
        2,
        "24 hour",
        hits(0, 1) + left(0.01, 1, 86_400) + hits(0.01, 1) + refused(0.01),
    ),
    (
        "sliding window counter, previous window",
        "sliding-window-counter",
        5,
        "1 second",
        hits(0, 3) + left(0.01, 2, 1) + left(1.06, 3, 0.27) + hits(1.06, 2) + once_more(1.06) + once_more(1.41)
        + once_more(1.75),
    ),
    ("sliding window counter, costs", "sliding-window-counter", 10, "2 minute", COSTS),
    ("sliding window counter, two hits", "sliding-window-counter", 2, "1 hour", TWO_AN_HOUR),
    (
        "moving window, numbers",
        "moving-window",
        2,
        "1 minute",
        hits(0, 1) + hits(1, 1) + refused(2) + left(2, 0, 58),
    ),
    ("moving window", "moving-window", 10, "2 second", left(0, 10) + hits(0, 5) + hits(1.8, 5) + refused(1.8)),
    (
        "moving window, costs",
        "moving-window",
        10,
        "2 second",
        refused(0, "k1", 11) + hits(0, 1, cost=5) + hits(1.8, 4) + refused(1.8, cost=2) + hits(1.8, 1) + hits(2.1, 5)
        + left(2.1, 0) + refused(2.1, cost=2),
    ),
    (
        "moving window, varying cost",
        "moving-window",
        5,
        "1 minute",
        hits(0, 1, cost=5) + refused(0, cost=2),
    ),
    (
        "moving window, huge cost",
        "moving-window",
        1_000_000,
        "2 second",
        hits(0, 1) + hits(1, 1, cost=999_999) + left(2.2, 1) + clear(2.2) + left(2.2, 1_000_000),
    ),
    ("moving window, two hits", "moving-window", 2, "1 hour", TWO_AN_HOUR),
]


class Package:
    name = "limits"
    # The reset is a float.
    rounding = 0.05

    def __init__(self, strategy, amount, period):
        self.limit = limits.parse(f"{amount} per {period}")
        # In memory, its sliding windows begin at multiples of the period. On Redis they begin at the first
        # hit, as ours do.
        is_sliding = strategy == "sliding-window-counter"
        self.limiter = STRATEGIES[strategy](REDIS if is_sliding else storage.MemoryStorage())
        self.prefix = str(next(PREFIXES))

    def hit(self, key, cost):
        return self.limiter.hit(self.limit, self.prefix, key, cost=cost)

    def stats(self, key):
        stats = self.limiter.get_window_stats(self.limit, self.prefix, key)
        return stats.remaining, stats.reset_time - time.time()

    def clear(self, key):
        self.limiter.clear(self.limit, self.prefix, key)


class Server:
    name = "the example server"
    # The reset is in whole seconds, rounded up. That of a sliding window counter is just after the end
    # of the window.
    rounding = 2.05

    def __init__(self, strategy, amount, period):
        flags = ("--key", "header:x-key", "--cost-header", "x-cost", "--clear-status", "204")
        number, unit = period.split()
        port = servers.example_server("--policy", f"{strategy} {amount} per {number}{unit}s", *flags)
        self.connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask(self, path, key, cost):
        self.connection.request("GET", path, headers={"x-key": key, "x-cost": str(cost)})
        response = self.connection.getresponse()
        response.read()
        return response

    def hit(self, key, cost):
        return {200: True, 429: False}[self.ask("/", key, cost).status]

    def stats(self, key):
        fields = self.ask("/", key, 0).headers
        return int(fields["x-ratelimit-remaining"]), int(fields["x-ratelimit-reset"]) - time.time()

    def clear(self, key):
        # The server clears a key after an admitted request that costs something, so no exhausted key.
        self.ask("/status/204", key, 1)


def replay(judge, steps):
    """Returns the differences, and `True` if a step was late."""
    start, late, different = time.monotonic(), False, []
    for at, key, action, first, second in steps:
        time.sleep(max(0.0, start + at - time.monotonic()))
        if action == "hit":
            admitted = judge.hit(key, first)
            if admitted != second:
                different.append(f"at {at} s, cost {first}: admitted is {admitted}, expected {second}")
        elif action == "clear":
            judge.clear(key)
        else:
            remaining, reset = judge.stats(key)
            if remaining != first:
                different.append(f"at {at} s: {remaining} units remain, expected {first}")
            if second is not None and not second - LATE - 0.05 <= reset <= second + LATE + judge.rounding:
                different.append(f"at {at} s: the reset is in {reset:.3f} s, expected {second}")
        late = late or time.monotonic() > start + at + LATE
    return different, late


def run(trace):
    name, strategy, amount, period, steps = trace
    lines = []
    for kind in (Package, Server):
        for _ in range(ATTEMPTS):
            different, late = replay(kind(strategy, amount, period), steps)
            if not late:
                break
        else:
            different = different or ["the machine was too busy in each attempt"]
        lines += [f"{kind.name}: {line}" for line in different]
    return name, len(steps), lines


def main():
    print(f"limits {limits.__version__}: {len(TRACES)} traces of its tests, on it and on the example server")
    failed = False
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for name, count, lines in pool.map(run, TRACES):
            print(f"  {name}: " + ("; ".join(lines) if lines else f"all {count} results are the expected ones"))
            failed = failed or bool(lines)
    sys.exit(failed)


main()
