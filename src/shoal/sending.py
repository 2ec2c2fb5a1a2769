"""Wiring: processes that take a run's numbers to other tools while it goes on, one for each of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from shoal.files import mask

END_SECONDS = 30.0
"""How long a tool may take for the rest, once the run is over."""
STOPPED_SECONDS = 5.0
"""The same where somebody has stopped the run and waits for the prompt."""


class Sending:
    """The processes of one run. Nothing is done between calls of `look`, and whatever they do, the run goes on."""

    def __init__(
        self,
        run_dir: str,
        targets: Sequence[str],
        since: float,
        show: Callable[[str], None],
        copy_to: str | None = None,
    ) -> None:
        """Numbers go to the targets, and the whole folder to `copy_to`, a URL."""
        self._show = show
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._rest: dict[str, bytes] = {}
        for target in targets:
            self._start("shoal.observe.send", run_dir, target, since)
        if copy_to is not None:
            self._start("shoal.observe.mirror", run_dir, copy_to, since)

    def _start(self, module: str, run_dir: str, target: str, since: float) -> None:
        order = json.dumps({"run_dir": run_dir, "to": target, "since": since}).encode() + b"\n"
        try:
            # A session of its own: Ctrl-C is for the launcher, which lets it send the rest.
            process = subprocess.Popen(
                # -P: a folder `wandb` where the run was started is not the package.
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(order)
            process.stdin.flush()
        except OSError as error:
            self._show(f"nothing is sent to {mask(target)}: {error.strerror or error}")
            return
        os.set_blocking(process.stdout.fileno(), False)
        self._processes[target] = process

    def look(self) -> None:
        """Pass on what they have to say."""
        for target, process in self._processes.items():
            assert process.stdout is not None
            with contextlib.suppress(BlockingIOError, OSError):
                lines = self._rest.get(target, b"") + os.read(process.stdout.fileno(), 1 << 16)
                *whole, self._rest[target] = lines.split(b"\n")
                for line in whole:
                    self._show(line.decode("utf-8", "replace"))

    def close(self, *, is_stopped: bool = False) -> None:
        """Let them send the rest. Who takes too long is ended, and people are told how to send it later."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        seconds = STOPPED_SECONDS if is_stopped else END_SECONDS
        deadline = time.monotonic() + seconds
        for target, process in self._processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._show(f"{mask(target)} has not taken everything within {seconds:.0f} s, and is left behind")
                self._kill(process)
        self.look()
        for process in self._processes.values():
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()

    @staticmethod
    def _kill(process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(OSError):
            # With what a tool has started in turn.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
