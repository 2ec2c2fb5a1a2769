"""Looking into processes from outside: how many at a time. What py-spy sees is in tests/run/test_recording.py."""

import threading
from pathlib import Path

import pytest

from shoal.engine import native

PROGRAM = """\
#!/bin/sh
echo in >> {log}; sleep 0.2; echo out >> {log}
echo "Thread 1"
"""


def test_all_ranks_of_a_machine_are_looked_into_at_once_but_not_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, program = tmp_path / "log", tmp_path / "py-spy"
    program.write_text(PROGRAM.format(log=log))
    program.chmod(0o755)
    monkeypatch.setattr(native, "find_py_spy", lambda: str(program))
    found: dict[int, native.Look] = {}
    are_all_there = threading.Event()

    def tell(look: native.Look) -> None:
        found[look.rank] = look
        if len(found) == 12:
            are_all_there.set()

    native.look_into_all({rank: 1000 + rank for rank in range(12)}, tell)
    assert are_all_there.wait(20)
    assert {look.text for look in found.values()} == {"Thread 1"}
    now = most = 0
    for word in log.read_text().split():
        now += 1 if word == "in" else -1
        most = max(most, now)
    assert 2 <= most <= native.AT_ONCE
