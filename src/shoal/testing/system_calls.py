"""A disk that fails, or a process that dies, at a chosen system call: for sweeps over every point of a save."""

import os
from collections.abc import Callable
from typing import Any

CHANGES_DISK = frozenset({"open", "write", "fsync", "mkdir", "rename", "statvfs", "unlink", "rmdir", "scandir"})


class FaultyOs:
    """The `os` module, except that `act(name)` runs instead of the call number `at` among `names`.

    Put it where a module has its `os`: `monkeypatch.setattr(disk, "os", FaultyOs(at=3, act=...))`. `act` raises an
    OSError, or kills the process; if it returns, the real call is made. `num_calls` counts the calls so far.
    """

    def __init__(self, *, at: int, act: Callable[[str], None], names: frozenset[str] = CHANGES_DISK) -> None:
        self.num_calls = 0
        self._at = at
        self._act = act
        self._names = names

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self._names:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self._at:
                self._act(name)
            return real(*args, **kwargs)

        return call
