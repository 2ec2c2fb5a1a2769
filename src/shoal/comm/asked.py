"""Receives that wait for their turn."""

from collections import deque
from collections.abc import Callable

import torch


class Asked:
    """What was asked of one source. Nothing is taken before someone waits: two ranks may both ask first, then send.

    `take` receives one message; messages are taken in the order they were asked for, whichever is waited for first.
    """

    def __init__(self, take: Callable[[torch.Tensor], None]) -> None:
        self._take = take
        self._queue: deque[Receiving] = deque()

    def ask(self, flat: torch.Tensor) -> "Receiving":
        self._queue.append(Receiving(self, flat))
        return self._queue[-1]

    def take_until(self, work: "Receiving") -> None:
        while not work.is_done:
            ahead = self._queue.popleft()
            ahead.is_done = True
            self._take(ahead.flat)


class Receiving:
    """One message asked for."""

    def __init__(self, asked: Asked, flat: torch.Tensor) -> None:
        self._asked, self.flat, self.is_done = asked, flat, False

    def wait(self) -> None:
        self._asked.take_until(self)
