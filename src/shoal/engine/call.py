"""A function call on its way to workers and the values on their way back, through files without a name.

Pickle is used because a function cannot be sent otherwise. The bytes are written by this process or by workers it
started itself, into memory that only they hold.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from shoal.spec.errors import UserError, WorkerError


class CallFiles:
    """The descriptors of one call: one that all workers read, and one a worker for its result. Closed in the end."""

    def __init__(self, payload: bytes, num_workers: int) -> None:
        self._results: list[int] = []
        self._payload = _memory_file("shoal-call")
        try:
            _write(self._payload, payload)
            for _ in range(num_workers):
                self._results.append(_memory_file("shoal-result"))
        except BaseException:
            self.close()
            raise

    def entry_of(self, rank: int) -> tuple[str, ...]:
        """What `worker.py` is to run."""
        return ("call", str(self._payload), str(self._results[rank]))

    def fds_of(self, rank: int) -> tuple[int, ...]:
        """What a worker must inherit."""
        return (self._payload, self._results[rank])

    def read_result(self, rank: int) -> Any:
        """The value that the function returned on a worker that has ended well."""
        size = os.fstat(self._results[rank]).st_size
        try:
            return pickle.loads(_read(self._results[rank], size))
        except Exception as error:
            raise WorkerError(
                "A returned value could not be read.", why=f"{type(error).__name__}: {error}", rank=rank
            ) from error

    def close(self) -> None:
        for fd in [self._payload, *self._results]:
            os.close(fd)
        self._results.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pack_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call as bytes: a line of JSON with what unpickling needs, then the pickle."""
    header = json.dumps({"path": sys.path, "argv": sys.argv})
    return header.encode() + b"\n" + _pickle_call(function, (function, tuple(args), dict(kwargs)))


def _pickle_call(function: Callable[..., Any], call: tuple[Any, ...]) -> bytes:
    from cloudpickle import dumps

    try:
        return bytes(dumps(call))
    except Exception as error:
        raise UserError(
            f"{name_of(function)} or its arguments cannot be sent to workers.",
            why=f"{type(error).__name__}: {error}",
            hint="open files, locks and connections inside the function instead of passing them in",
        ) from error


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _memory_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile

    # Has no name from the start, or loses it before anyone can use it.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return bytes(data)
