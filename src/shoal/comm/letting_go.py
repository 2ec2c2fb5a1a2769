"""How a process group of PyTorch is destroyed without anybody waiting for it.

gloo's `abort` does nothing, and its destructor waits for calls that are under way. One that misses a dead rank ends
when the other survivors have hung up, and they hang up by destroying theirs. So nobody may wait for a destructor in
a place where others wait for him; least of all in a garbage collection, which comes wherever it likes.
"""

import sys
import threading
import time
from collections import deque
from typing import Any

import torch.distributed as dist

_LOOK_SECONDS = 0.05


class UnderWay:
    """The calls of a group that have not ended, as far as anybody looked. They keep their tensors alive."""

    def __init__(self) -> None:
        self._calls: deque[dist.Work] = deque()

    def add(self, call: dist.Work) -> None:
        self._calls.append(call)

    def forget_ended(self) -> bool:
        """Let go of those that have ended, oldest first; whether that was all of them."""
        while self._calls and self._calls[0].is_completed():
            self._calls.popleft()
        return not self._calls


def let_go(backend: list[Any], calls: UnderWay) -> None:
    """Destroy the first of this list: now where nothing is under way, else as soon as its calls have ended.

    The rest of the list is what must live as long as that. Others may still refer to it, as tracebacks do; it is kept
    until they do not, so that whoever lets go last is not the one to destroy it.
    """
    if not _drop(backend, calls):
        threading.Thread(target=_drop_later, args=(backend, calls), name="shoal-let-go", daemon=True).start()


def _drop(backend: list[Any], calls: UnderWay) -> bool:
    # One reference is the list's, the other that of the question.
    if sys.getrefcount(backend[0]) > 2 or not calls.forget_ended():
        return False
    del backend[0]
    return True


def _drop_later(backend: list[Any], calls: UnderWay) -> None:
    while not _drop(backend, calls):
        time.sleep(_LOOK_SECONDS)
