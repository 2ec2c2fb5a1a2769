"""Lines that are written behind the training loop's back."""

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from shoal.observe.lines import Appender

FLUSH_SECONDS = 0.25
MAX_UNSAVED = 100_000

Item = TypeVar("Item")


class DelayedAppender(Generic[Item]):
    """Takes items; a thread of its own writes them at most four times a second, a line each.

    `write` is an append to a list: it never blocks and never fails. Where the disk does, that is reported once, the
    newest 100,000 lines are kept, and they are written when the disk works again. What was taken is on its way to
    the disk within a quarter of a second; `close`, which also runs at the end of the process, writes the rest.
    """

    def __init__(self, file: Appender, encode: Callable[[Item], bytes], *, name: str) -> None:
        self._file = file
        self._encode = encode
        self._taken: deque[Item] = deque()
        self._unsaved: list[bytes] = []
        self._flushing = threading.Lock()
        self._is_closed = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, item: Item) -> None:
        """Take one item; costs a tenth of a microsecond."""
        self._taken.append(item)

    def flush(self) -> bool:
        """Write what was taken so far, in the caller's thread; False where the disk refused some of it."""
        with self._flushing:
            while self._taken:
                self._unsaved.append(self._encode(self._taken.popleft()) + b"\n")
            del self._unsaved[:-MAX_UNSAVED]
            if self._unsaved:
                safe = self._file.append(b"".join(self._unsaved))
                self._unsaved = _after(self._unsaved, safe)
            return not self._unsaved

    def close(self) -> None:
        """Write the rest and stop the thread. A forked child closes nothing: the lines are its parent's."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join()
        self.flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closed.wait(FLUSH_SECONDS):
            self.flush()


def _after(lines: list[bytes], num_bytes: int) -> list[bytes]:
    for index, line in enumerate(lines):
        if num_bytes <= 0:
            return lines[index:]
        num_bytes -= len(line)
    return []
