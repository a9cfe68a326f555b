"""Measures decisions per second of the Python package `limits`, in memory and on a Redis server, with one caller."""

import sys
import time

import limits
from limits import strategies
from limits.storage import MemoryStorage, RedisStorage

SPAN = 1.0
PLENTY = 4_000_000


def per_second(hit):
    hit()
    start, hits = time.perf_counter(), 0
    while time.perf_counter() - start < SPAN:
        for _ in range(50):
            hit()
        hits += 50
    return hits / (time.perf_counter() - start)


def main():
    memory, redis = MemoryStorage(), RedisStorage(sys.argv[1])
    hour = limits.parse(f"{PLENTY}/hour")
    few = limits.parse("100/hour")
    stacked = [limits.parse(text) for text in (f"{PLENTY}/minute", f"{PLENTY}/hour", f"{PLENTY}/day")]
    kinds = [
        ("fixed window", strategies.FixedWindowRateLimiter, hour),
        ("sliding window counter", strategies.SlidingWindowCounterRateLimiter, hour),
        ("moving window", strategies.MovingWindowRateLimiter, few),
    ]
    for name, kind, limit in kinds:
        in_memory, on_redis = kind(memory), kind(redis)
        key = name.replace(" ", "-")
        print(f"memory, {name}: {per_second(lambda: in_memory.hit(limit, key)):.0f}")
        print(f"Redis, {name}: {per_second(lambda: on_redis.hit(limit, key)):.0f}")

        def with_numbers():
            on_redis.hit(limit, key)
            on_redis.get_window_stats(limit, key)

        print(f"Redis, {name}, with numbers for the headers: {per_second(with_numbers):.0f}")
    fixed = strategies.FixedWindowRateLimiter(redis)
    print(f"Redis, three limits: {per_second(lambda: all(fixed.hit(limit, 'three') for limit in stacked)):.0f}")


main()
