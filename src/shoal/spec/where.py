"""Whose code a frame belongs to: the user's, a library's, or ours. Errors point at the user's."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from types import TracebackType

OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_PYTHON = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: the program itself, or neither ours nor an installed library's."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    if filename == program:
        return True
    if filename == "<string>":
        # Code that a library made (the `__init__` of a dataclass), unless the program is that of `python -c`.
        return program is None
    is_library = filename.startswith(("<frozen", OURS, *_PYTHON)) or "-packages" + os.sep in filename
    return bool(filename) and not is_library


def place_of(error: BaseException) -> str:
    """`file:line` of the innermost frame in the user's own code, or of the innermost at all; paths from here."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shorten(error.filename)}:{error.lineno}"
    frames = list(_frames(error.__traceback__))
    return users_place_of(error) or (f"{_shorten(frames[-1][0])}:{frames[-1][1]}" if frames else "")


def users_place_of(error: BaseException) -> str:
    """`file:line` of the innermost frame in the user's own code; empty where there is none."""
    theirs = [frame for frame in _frames(error.__traceback__) if is_users(frame[0])]
    return f"{_shorten(theirs[-1][0])}:{theirs[-1][1]}" if theirs else ""


def place_of_function(function: object) -> str:
    """`file:line` where a function of the user's is defined, through decorators and partials; empty for others."""
    for _ in range(8):
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None) or function
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{_shorten(code.co_filename)}:{code.co_firstlineno}" if code and is_users(code.co_filename) else ""


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _shorten(path: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return path[len(here) :] if path.startswith(here) else path


def format_error(error: BaseException) -> str:
    """The traceback of a user's error, causes included, without our own frames."""
    summary = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [summary]
    while pending:
        part = pending.pop()
        if part is not None:
            theirs = [frame for frame in part.stack if not frame.filename.startswith(OURS)]
            part.stack = traceback.StackSummary.from_list(theirs or list(part.stack))
            pending += [part.__cause__, part.__context__, *(part.exceptions or ())]
    return "".join(summary.format())
