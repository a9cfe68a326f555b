"""Measures decisions per second of the Python package `limits` on a memcached server.

Usage: peer.py HOST:PORT THREADS, with `limits` and `pymemcache` installed.
"""

import sys
import threading
import time

import limits
from limits import strategies
from limits.storage import MemcachedStorage

SPAN = 2.0


def main():
    address, threads = sys.argv[1], int(sys.argv[2])
    limiter = strategies.SlidingWindowCounterRateLimiter(MemcachedStorage(f"memcached://{address}"))
    limit, counts = limits.parse("4000000/hour"), [0] * threads
    limiter.hit(limit, "warm")
    end = time.perf_counter() + SPAN

    def work(number):
        while time.perf_counter() < end:
            limiter.hit(limit, f"client-{number}-{counts[number] % 100}")
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"memcached, sliding window counter, {threads} threads: {sum(counts) / SPAN:.0f}")


main()
