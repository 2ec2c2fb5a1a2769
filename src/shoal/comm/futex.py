"""Sleeping on a word of shared memory, and the order in which other processes see our stores.

Three things Python cannot say by itself come from one system call, `futex(2)`, reached through ctypes:

- *sleep*: the kernel compares the word with what we saw and sleeps only if it is unchanged, so that a wake between
  our look and our sleep is never missed;
- *wake*: everyone asleep on the word, in any process that maps it;
- *fence*: FUTEX_WAKE begins with a full memory barrier (the kernel needs one itself, to see the waiters).
"""

import ctypes
import errno
import os
import platform
import threading

# One number per architecture; the call has the same shape everywhere.
_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_MACHINE = platform.machine()
_NUMBER = _NUMBERS.get(_MACHINE)
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1

# x86 never reorders two stores or two loads, so data written before a flag is seen before the flag.
STORES_ARE_ORDERED = _MACHINE in ("x86_64", "AMD64")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_scratch = ctypes.c_uint32(0)
_lock = threading.Lock()


def is_available() -> bool:
    """Whether this machine has futexes we know how to call."""
    return _NUMBER is not None and platform.system() == "Linux"


def wait(address: int, seen: int, timeout_seconds: float) -> None:
    """Sleep until woken, unless the 32-bit word at `address` no longer equals `seen`; at most `timeout_seconds`.

    May also return for no reason: look again. The interpreter lock is free meanwhile.
    """
    whole = int(timeout_seconds)
    limit = _Timespec(whole, int((timeout_seconds - whole) * 1e9))
    if _syscall(_NUMBER, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0) == -1:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))


def wake(address: int) -> None:
    """Wake everyone who sleeps on the word at `address`. A full memory barrier; about 1 µs."""
    _syscall(_NUMBER, address, _WAKE, _EVERYONE, None, None, 0)


def fence() -> None:
    """Finish all our stores before any of our later loads.

    On x86 taking a free lock is enough: it compiles to a locked instruction, which drains the store buffer (0.2 µs).
    Elsewhere a lock only orders one way, so the kernel's barrier is borrowed.
    """
    if STORES_ARE_ORDERED:
        with _lock:
            pass
    else:
        wake(ctypes.addressof(_scratch))
