"""Questions to a cluster that take their time, each in a process of its own: `ray_jobs.py` answers them.

What it does meanwhile is shown. It ends with the question, whatever Ray is waiting for.
"""

import contextlib
import json
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from shoal.engine.env import inherited_env
from shoal.spec.errors import ShoalError, UserError

ANSWER_SECONDS = 60.0


def ask(verb: str, address: str | None, facts: Any, *, out: TextIO | None = None) -> Any:
    """Ask Ray in a process of its own, which is ended with this call; what a run prints goes to `out`."""
    asking = subprocess.Popen(
        [sys.executable, "-m", "shoal.cluster.ray_jobs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=inherited_env(),
        # Ctrl-C is for us.
        start_new_session=True,
    )
    assert asking.stdin is not None
    assert asking.stdout is not None
    assert asking.stderr is not None
    heard: queue.Queue[bytes] = queue.Queue()
    errors: list[bytes] = []
    readers = [
        threading.Thread(target=_read, args=(asking.stdout, heard.put), daemon=True),
        threading.Thread(target=_read, args=(asking.stderr, errors.append), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        asking.stdin.write(json.dumps({"verb": verb, "address": address, "facts": facts}).encode() + b"\n")
        asking.stdin.flush()
        return _hear(heard, out, address)
    except (EOFError, BrokenPipeError):
        readers[1].join(5.0)
        words = b"".join(errors).decode(errors="replace").strip().splitlines()
        raise ShoalError(
            f"Asking {address or 'the cluster'} did not work.",
            why=words[-1][:400] if words else "the process that asked ended without a word",
            hint="see whether `shoal nodes` works there",
        ) from None
    finally:
        asking.kill()
        asking.wait()
        for reader in readers:
            reader.join(5.0)
        for stream in (asking.stdin, asking.stdout, asking.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _read(stream: Any, put: Callable[[bytes], None]) -> None:
    for line in stream:
        put(line)
    put(b"")


def _hear(heard: "queue.Queue[bytes]", out: TextIO | None, address: str | None) -> Any:
    """The answer to a question; what comes before it is shown. Once it is under way there is no time limit."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            line = heard.get(timeout=min(max(0.0, deadline - time.monotonic()), ANSWER_SECONDS))
        except queue.Empty:
            if time.monotonic() < deadline:
                continue
            raise ShoalError(
                f"{address or 'The cluster'} did not answer within {ANSWER_SECONDS:.0f} s.",
                hint="see whether `shoal nodes` works there",
            ) from None
        if not line:
            raise EOFError
        match json.loads(line):
            case {"text": text}:
                if out is not None:
                    out.write(text)
                    out.flush()
            case {"is_under_way": True}:
                deadline = math.inf
            case {"progress": text}:
                say(text)
            case {"error": error, "is_user": is_user}:
                raise (UserError if is_user else ShoalError)(error["message"], why=error["why"], hint=error["hint"])
            case {"answer": answer}:
                return answer


def say(text: str) -> None:
    """Progress, which is no part of the answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
