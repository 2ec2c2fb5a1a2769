"""Clocks that jump: the wall clock of a process moves, its monotonic clock does not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.testing.rigs import leftovers
from shoal.testing.rigs.machine import RigMissing, require


class Clock:
    """The wall clock of the processes that are started with `env`. Made by `clock_jump`."""

    def __init__(self, library: Path, offset: Path, *, is_cheap: bool) -> None:
        self._offset = offset
        looks = {"FAKETIME_CACHE_DURATION": "1"} if is_cheap else {"FAKETIME_NO_CACHE": "1"}
        self.env = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            **looks,
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # Else it takes the end of monotonic waits for wall time, and threads get their locks 0.1 s late.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def jump(self, seconds: float) -> None:
        """Set the clock so far off the true time; negative is into the past."""
        passing = self._offset.with_suffix(".new")
        passing.write_text(f"{seconds:+f}s\n")
        os.replace(passing, self._offset)


@contextmanager
def clock_jump(seconds: float = 0.0, *, is_cheap: bool = False) -> Iterator[Clock]:
    """A clock that is off by so much, and can jump: `subprocess.run(command, env={**os.environ, **clock.env})`.

    A jump is seen at once, by opening a file in every call. With `is_cheap` it is seen within a second: for processes
    that ask for the time so often that it would slow them down. Needs the package `libfaketime`, not root.
    """
    require("rigs.clock_jump", "libfaketime")
    library = _find_library()
    with leftovers.rig_folder() as folder:
        clock = Clock(library, folder / "offset", is_cheap=is_cheap)
        clock.jump(seconds)
        yield clock


def _find_library() -> Path:
    from importlib.util import find_spec

    spec = find_spec("libfaketime")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        # The one with MT in its name is for programs with threads.
        for library in sorted(Path(place).rglob("libfaketime*.so*"), reverse=True):
            return library
    raise RigMissing("rigs.clock_jump is not possible here.", why="libfaketime has no library for this machine")
