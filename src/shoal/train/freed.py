"""Memory that was freed, given back to the machine."""

import ctypes
from functools import cache

_MMAP_THRESHOLD = -3  # as in <malloc.h>
LARGE_BYTES = 1 << 20


@cache
def _libc() -> ctypes.CDLL | None:
    """glibc; other C libraries keep less, and have none of this."""
    found = ctypes.CDLL(None)
    return found if hasattr(found, "malloc_trim") and hasattr(found, "mallopt") else None


def give_back() -> None:
    """Give pages that hold nothing any more back, which the C library keeps for later.

    After large tensors were moved elsewhere it keeps as much as they were: the size of the model, in every worker.
    Costs some milliseconds, and a page fault for each page that is used again.
    """
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def give_back_at_once() -> None:
    """From now on give the memory of large tensors back as soon as they are gone, in all of this process.

    Where buffers of many sizes come and go, the C library would keep holes between them: in a step of sharded
    training as much as the model. Each of their pages then costs a page fault, about 0.2 ms a MiB.
    """
    if (libc := _libc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
