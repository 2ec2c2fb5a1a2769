"""A function call on its way to workers and the values on their way back.

Pickle is used because a function cannot be sent otherwise. The bytes are written by this process or by workers that
it had started itself; on a machine they are in files without a name, between machines on a line that nobody else can
write to.
"""

import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.engine.engine import CALL_FD, RESULT_FD
from shoal.spec.errors import UserError, WorkerError

ENTRY = ("call", CALL_FD, RESULT_FD)
"""What `worker.py` is to run."""


def read_result(rank: int, data: bytes | None) -> Any:
    """The value that the function returned on a worker that has ended well."""
    try:
        return pickle.loads(data or b"")
    except Exception as error:
        raise WorkerError(
            "A returned value could not be read.", why=f"{type(error).__name__}: {error}", rank=rank
        ) from error


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
