"""Starts the servers of the checks, and ends them when the program ends."""

import atexit
import itertools
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import time

FOLDER = pathlib.Path(tempfile.mkdtemp())
# The workers of nginx have another user.
FOLDER.chmod(0o755)
PROCESSES = []
NUMBERS = itertools.count()


@atexit.register
def end_all():
    for process in PROCESSES:
        # The example server would wait for the end of its streams.
        process.kill()
    for process in PROCESSES:
        process.wait()
    shutil.rmtree(FOLDER)


def start(command, output):
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    PROCESSES.append(process)
    return process


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(process, port, log):
    """Waits until the server listens."""
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended: {log.read_text()}")
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return port
        except OSError:
            time.sleep(0.02)


def redis():
    """Starts a Redis server, and returns its port."""
    port, log = free_port(), FOLDER / "redis"
    with log.open("wb") as output:
        process = start(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""], output)
    return wait_for(process, port, log)


def example_server(*flags):
    """Starts the example server, and returns its port."""
    log = FOLDER / f"server-{next(NUMBERS)}"
    with log.open("wb") as output:
        process = start([os.environ["EXAMPLE_SERVER"], "--listen", "127.0.0.1:0", *flags], output)
    while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())):
        if process.poll() is not None:
            raise RuntimeError(f"the example server has ended: {log.read_text()}")
        time.sleep(0.02)
    return int(found[1])


def nginx(http, locations):
    """Starts nginx with these lines in its sections `http` and `server`, and returns its port."""
    port = free_port()
    folder = FOLDER / f"nginx-{port}"
    folder.mkdir()
    paths = "".join(f"{kind}_temp_path {folder / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = folder / "config"
    config.write_text(
        f"daemon off; master_process off; pid {folder / 'pid'}; error_log stderr crit; events {{}} "
        f"http {{ access_log off; {paths} {http} server {{ listen 127.0.0.1:{port}; {locations} }} }}"
    )
    log = folder / "log"
    with log.open("wb") as output:
        process = start([shutil.which("nginx") or "/usr/sbin/nginx", "-c", str(config)], output)
    return wait_for(process, port, log)
