"""A real service in a process of its own, for tests: start it, kill it, ask it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.service.client import Client
from shoal.service.places import read_up, service_folder


class Daemon:
    """The service of one home. Its port and its token are found in its files, as everybody finds them."""

    def __init__(self, home: Path, host: str = "127.0.0.1", before: str = "") -> None:
        self.home, self.host, self.before = home, host, before
        self.folder = service_folder(str(home))
        self.process: subprocess.Popen[bytes] | None = None
        with socket.create_server((host, 0)) as free:
            self._port = free.getsockname()[1]

    def start(self) -> None:
        """Start it; it is not up yet when this returns."""
        log = open(self.home / "service.log", "ab")  # noqa: SIM115 - closed below
        with log:
            code = f"{self.before}\nimport sys\nfrom shoal.service.daemon import main\nsys.exit(main(sys.argv[1:]))"
            how = ["-c", code] if self.before else ["-m", "shoal.service.daemon"]
            command = [sys.executable, *how, str(self.home), self.host, str(self._port)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_up(self, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            up = read_up(self.folder)
            if up is not None and self.process is not None and up.pid == self.process.pid:
                return
            assert self.process is None or self.process.poll() is None, self.log
            time.sleep(0.01)
        raise AssertionError(f"the service did not come up: {self.log}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    @property
    def log(self) -> str:
        return (self.home / "service.log").read_text(errors="replace")[-4000:]

    def client(self, patience_seconds: float = 60.0) -> Client:
        return Client(patience_seconds=patience_seconds)


@contextlib.contextmanager
def serving(home: Path, host: str = "127.0.0.1", before: str = "") -> Iterator[Daemon]:
    """A service that is up, in a process that ran the code `before`. Whatever it started is ended with it."""
    os.makedirs(home, exist_ok=True)
    daemon = Daemon(home, host, before)
    daemon.start()
    try:
        daemon.wait_up()
        yield daemon
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()
