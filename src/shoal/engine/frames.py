"""What a process was doing, read from what `faulthandler` wrote. Pure: text in, frames out."""

import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.spec.where import OURS

MAX_TOLD = 3
MAX_KEPT = 16
"""Frames that people are told at once, and that a journal keeps; files have all of them."""

_THREAD = re.compile(r"(?:Current thread|Thread) 0x\w+.*:")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_STARTER = os.path.join(OURS, "engine", "worker.py")
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: str
    function: str

    @property
    def is_users(self) -> bool:
        """Neither ours nor an installed library's. Workers may have another Python, so its folder is guessed too."""
        is_library = self.file.startswith(("<frozen", "<string>", OURS, _PYTHON)) or "-packages/" in self.file
        return not is_library and "/lib/python" not in self.file

    def tell(self, working_dir: str = "") -> str:
        file = self.file.removeprefix(os.path.join(working_dir, "")) if working_dir else self.file
        if not self.is_users and file == self.file:
            file = os.path.join(*self.file.split("/")[-2:])
        return f"{file}:{self.line} in {self.function}"


Thread = tuple[Frame, ...]
"""The innermost frame first."""


def parse(text: str) -> list[Thread]:
    """The threads in a dump, in its order: the main thread of a process comes last."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            threads[-1].append(Frame(found["file"], found["line"], found["function"]))
    return [tuple(frames) for frames in threads if frames]


def pick(processes: Sequence[Sequence[Thread]]) -> Thread:
    """The thread that says most about why a worker does not go on; `processes` are its threads, and its children's.

    That is the main thread, unless it waits for data: then it is the thread or the process that reads the data, and
    is held up in code of the user's.
    """
    main, others = _split(processes)
    if not _waits_for_data(main):
        return main
    return next((thread for thread in others if _is_users(thread) and not _waits_for_data(thread)), main)


def _split(processes: Sequence[Sequence[Thread]]) -> tuple[Thread, list[Thread]]:
    worker = list(processes[0]) if processes else []
    main = worker.pop() if worker else ()
    return main, [*worker, *(thread for process in processes[1:] for thread in reversed(process))]


def _is_users(thread: Thread) -> bool:
    return any(frame.is_users for frame in thread)


def _waits_for_data(thread: Thread) -> bool:
    """Between where it is and the innermost frame of the user's, it is in something that hands out batches."""
    for frame in thread:
        if frame.is_users:
            return False
        is_packaged = frame.file.startswith(OURS) or "-packages/" in frame.file
        in_package = "/" + frame.file.removeprefix(OURS).rpartition("-packages/")[2]
        if is_packaged and "/data/" in in_package:
            return True
    return False


def tell(thread: Thread, working_dir: str = "") -> str:
    """Where a thread is, in a line: the innermost frame, and the innermost of the user's own."""
    users = [frame for frame in thread if frame.is_users][:MAX_TOLD]
    shown = [*thread[:1], *(frame for frame in users if frame != thread[0])]
    return ", called from ".join(frame.tell(working_dir) for frame in shown)


def place(thread: Thread, working_dir: str = "") -> str:
    """`file:line` of the innermost frame of the user's, or of the innermost at all."""
    frame = next((frame for frame in thread if frame.is_users), thread[0] if thread else None)
    return frame.tell(working_dir).partition(" in ")[0] if frame is not None else ""


def brief(thread: Iterable[Frame], working_dir: str = "") -> list[str]:
    """For a journal: a line a frame, the innermost first, without those that started the script."""
    return [frame.tell(working_dir) for frame in thread if not frame.file.endswith(_STARTER)][:MAX_KEPT]
