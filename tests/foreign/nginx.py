"""Sends the same requests to nginx's `limit_req` and `limit_conn` and to the example server."""

import concurrent.futures
import http.client
import socket
import sys
import time

import servers

# A step that begins this many seconds after its time is late. The rates are 10 per second, so half a
# unit more has come back after 50 ms.
LATE = 0.03
ATTEMPTS = 5


class Target:
    """A server, with a path that is limited."""

    def __init__(self, port, path="/"):
        self.port, self.path, self.attempt = port, path, 0

    def ask(self, connection=None):
        connection = connection or http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", self.path, headers={"x-key": f"client-{self.attempt}"})
        response = connection.getresponse()
        response.read()
        return response.status

    def open(self, key):
        """Sends a request whose response takes minutes. Returns its status and the open socket."""
        stream = socket.create_connection(("127.0.0.1", self.port))
        stream.sendall(f"GET {self.path}slow?ms=300000 HTTP/1.1\r\nhost: a\r\nx-key: {key}\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += stream.recv(4096)
        return int(head.split()[1]), stream


def replay(target, steps):
    """Sends numbers of requests at times, and returns how many of each were admitted."""
    for _ in range(ATTEMPTS):
        target.attempt += 1
        connection = http.client.HTTPConnection("127.0.0.1", target.port)
        connection.connect()
        start, late, admitted = time.monotonic(), False, []
        for at, count in steps:
            time.sleep(max(0.0, start + at - time.monotonic()))
            admitted.append([target.ask(connection) for _ in range(count)].count(200))
            late = late or time.monotonic() > start + at + LATE
        if not late:
            return admitted
    return "the machine was too busy in each attempt"


def finishes(target):
    """Sends 8 requests at once. Returns the seconds after which the admitted ones have ended."""
    target.attempt += 1
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: (target.ask(), time.monotonic() - start), range(8)))
    return sorted(at for status, at in results if status == 200)


def slots(target):
    """Keeps requests in flight, and returns the statuses of each step."""
    held = [target.open("a") for _ in range(3)]
    seen = [[status for status, _ in held], [target.open("a")[0] for _ in range(2)], target.open("b")[0]]
    held.pop()[1].close()
    deadline = time.monotonic() + 20
    while (again := target.open("a"))[0] != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    held.append(again)
    seen += [again[0], target.open("a")[0]]
    for _, stream in held:
        stream.close()
    return seen


def main():
    backend = servers.example_server("--policy", "1000000/second")
    zones = "".join(
        f"limit_req_zone $http_x_key zone={zone}:1m rate={rate};" for zone, rate in [("slow", "1r/m"), ("fast", "10r/s")]
    )
    nginx = servers.nginx(
        f"{zones} limit_conn_zone $http_x_key zone=slots:1m; limit_req_status 429; limit_conn_status 429;",
        "".join(
            f"location {path} {{ {limit}; proxy_buffering off; proxy_pass http://127.0.0.1:{backend}/; }}"
            for path, limit in [
                ("/burst/", "limit_req zone=slow burst=20 nodelay"),
                ("/refill/", "limit_req zone=fast burst=5 nodelay"),
                ("/delay/", "limit_req zone=fast burst=5"),
                ("/slots/", "limit_conn slots 3"),
            ]
        ),
    )

    def ours(*flags):
        return Target(servers.example_server("--key", "header:x-key", *flags))

    failed = False

    def compare(name, theirs, mine, expected, rule=""):
        nonlocal failed
        is_same = theirs == mine == expected
        failed = failed or not is_same
        result = f"both {mine}" if is_same else f"nginx {theirs}, this crate {mine}, expected {expected}"
        print(f"  {name}: {result}{rule}")

    print("nginx and the example server")
    steps = [(0, 30)]
    compare(
        "limit_req 1r/m burst=20 nodelay, 30 requests",
        replay(Target(nginx, "/burst/"), steps),
        replay(ours("--policy", "token-bucket 1/minute burst 21"), steps),
        [21],
        " (a burst of nginx does not count the first request, so burst=20 is `burst 21`)",
    )
    steps = [(0, 8), (0.25, 4), (0.55, 5), (1.6, 8)]
    compare(
        "limit_req 10r/s burst=5 nodelay, 8, 4, 5 and 8 requests",
        replay(Target(nginx, "/refill/"), steps),
        replay(ours("--policy", "token-bucket 10/second burst 6"), steps),
        [6, 2, 3, 6],
    )
    theirs = finishes(Target(nginx, "/delay/"))
    mine = finishes(ours("--policy", "leaky-bucket 10/second queue 5"))
    # nginx counts in whole milliseconds.
    in_order = [all(at >= 0.1 * turn - 0.01 for turn, at in enumerate(ends)) for ends in (theirs, mine)]
    compare("limit_req 10r/s burst=5, 8 requests at once", len(theirs), len(mine), 6, " (`queue 5`)")
    compare("each admitted request 100 ms after the one before", *in_order, True)
    for name, ends in [("nginx", theirs), ("this crate", mine)]:
        print(f"    {name}: after {', '.join(f'{at * 1000:.0f}' for at in ends)} ms")
    compare(
        "limit_conn 3: three requests, two more, another client, one after a disconnect, one more",
        slots(Target(nginx, "/slots/")),
        slots(ours("--policy", "1000000/second", "--in-flight", "3")),
        [[200] * 3, [429] * 2, 200, 200, 429],
    )
    print("  nginx refuses with 503 unless limit_req_status and limit_conn_status are set, and writes no fields.")
    sys.exit(failed)


main()
