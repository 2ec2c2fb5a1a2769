"""Start the service on this machine, and end it: what `shoal up` and `shoal down` do."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from shoal.cluster.files import make_folder
from shoal.service import places
from shoal.service.client import Client
from shoal.spec.errors import ShoalError, UserError

START_SECONDS = 60.0
STOP_SECONDS = 60.0
Say = Callable[[str], None]


def start(home: str, host: str, port: int, say: Say) -> places.Up:
    """Start the service and return once it answers. It goes on without this process and its terminal."""
    folder = places.service_folder(home)
    make_folder(folder)
    path = os.path.join(folder, places.LOG)
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
        began = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.service.daemon", home, host, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    try:
        return _await_answer(folder, process, path, began, say)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        raise


def _await_answer(folder: str, process: "subprocess.Popen[bytes]", log: str, began: int, say: Say) -> places.Up:
    until, said = time.monotonic() + START_SECONDS, time.monotonic() + 1.0
    while time.monotonic() < until:
        if process.poll() is not None:
            raise _not_started(log, began)
        up = places.read_up(folder)
        if up is not None and up.pid == process.pid:
            with Client(patience_seconds=max(1.0, until - time.monotonic())) as client:
                client.health()
            return up
        if time.monotonic() > said:
            said = time.monotonic() + 5.0
            say("starting the service")
        time.sleep(0.05)
    raise ShoalError(f"The service did not start within {START_SECONDS:.0f} s.", hint=f"see {log}")


def _not_started(log: str, began: int) -> ShoalError:
    """What the process said of itself before it ended; a mistake of ours as such."""
    with open(log, "rb") as file:
        file.seek(began)
        lines = file.read(64 << 10).decode(errors="replace").strip().splitlines()
    told = {key: text for key, colon, text in (line.partition(": ") for line in lines) if colon}
    if lines and lines[0].startswith("error: "):
        return UserError(
            told["error"], where=told.get("   at", ""), why=told.get("  why", ""), hint=told.get("   do", "")
        )
    return ShoalError("The service did not start.", why=lines[-1] if lines else "it said nothing", hint=f"see {log}")


def stop(folder: str, up: places.Up, say: Say) -> None:
    """End the service; jobs go on without it. Returns when its process is gone, and forgets one that was killed."""
    if places.is_up(up):
        os.kill(up.pid, signal.SIGTERM)
    until, said = time.monotonic() + STOP_SECONDS, time.monotonic() + 1.0
    while places.is_up(up):
        if time.monotonic() > until:
            raise ShoalError(
                f"The service did not end within {STOP_SECONDS:.0f} s.",
                why=f"it is process {up.pid}",
                hint="try again",
            )
        if time.monotonic() > said:
            said = time.monotonic() + 5.0
            say("waiting for the service to end")
        time.sleep(0.02)
    places.remove_up(folder)
