"""What a worker is doing, in sixteen bytes that it shares with the launcher: readable also when it is dead."""

import mmap
import os
from struct import Struct

_SINCE, _ITEM, _BOTH = Struct("d"), Struct("q"), Struct("dq")


class Cell:
    """The item a worker is in and since when (monotonic seconds, which all processes of a machine share).

    The time is written before the item and read after it: a reader may see an item with a time that is too new, and
    then waits a little longer, never one with a time that is too old.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BOTH.size)

    def enter(self, number: int, since: float) -> None:
        _BOTH.pack_into(self._memory, 0, since, number + 1)

    def leave(self) -> None:
        _ITEM.pack_into(self._memory, 8, 0)

    def read(self) -> tuple[int | None, float]:
        (item,) = _ITEM.unpack_from(self._memory, 8)
        (since,) = _SINCE.unpack_from(self._memory, 0)
        return item - 1 if item else None, since

    def close(self) -> None:
        self._memory.close()


def make_cell() -> int:
    """The memory of a cell; nobody is in any item."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("shoal-cell")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _BOTH.size)
    return fd
