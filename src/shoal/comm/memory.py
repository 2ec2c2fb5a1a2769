"""Memory that processes of one host share: anonymous files, passed from hand to hand.

The memory is made by `memfd_create`, never in `/dev/shm`: a container's 64 MB limit does not apply, it has no name
that could be left behind, and it is gone with the last process that maps it, however that process ended.
"""

import mmap
import os
import weakref

from shoal.spec.errors import UserError

PAGE = mmap.PAGESIZE


def reserve(num_bytes: int, *, at_once: bool = True) -> int:
    """A descriptor of new shared memory, zeroed, a whole number of pages.

    With `at_once` the pages are taken now, so that too little memory is an error here and not a SIGBUS at first use.
    """
    num_bytes = round_up(max(num_bytes, 1), PAGE)
    fd = -1
    try:
        fd = os.memfd_create("shoal", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        if at_once:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise UserError(
            f"Could not get {num_bytes / 2**20:.1f} MiB of shared memory: {error.strerror}.",
            why="gradients and parameters of the workers on one host live in memory that all of them map",
            hint="use fewer workers or a smaller model, or raise the memory limit of the container",
        ) from error
    return fd


def map_memory(fd: int, *, at_once: bool = True) -> mmap.mmap:
    """Map all of a descriptor, for reading and writing; it stays mapped until the last tensor on it is gone.

    With `at_once` the page table is filled now, so that no page fault falls into a timed loop.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
    return mmap.mmap(fd, os.fstat(fd).st_size, flags=flags)


class Descriptor:
    """A descriptor that is closed with the last one who has it."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
