"""Messages between two ranks over sockets: announced, answered, and only then moved.

gloo ends the process of a receiver whose tensor is too small, and cannot be asked whether a message has arrived. So a
header with the sender's call goes first, the receiver answers with its own, and blocking waits happen in a thread
while the caller looks whether the other side still lives.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.asked import Asked
from shoal.comm.group import Call, Work, disagreement
from shoal.comm.roll import LOOK_SECONDS, Roll

_HEADER, _BODY, _ANSWER, _NUM_TAGS = 0, 1, 2, 3
_HERE = torch.device("cpu")


class Letters:
    """Messages to and from one rank. Headers and answers go through gloo, bodies through their device's backend.

    A backend is asked for whenever it is needed: it is the group's to keep, and to destroy.
    """

    def __init__(self, backend: Callable[[torch.device], Any], roll: Roll, peer: int) -> None:
        self._backend, self._roll, self._peer = backend, roll, peer
        self._num_sent, self._num_taken = 0, 0
        self._asked = Asked(self._take)

    def send(self, flat: torch.Tensor) -> Work:
        tag, self._num_sent = self._num_sent * _NUM_TAGS, self._num_sent + 1
        code, answer = Call("send", flat.numel(), flat.dtype).code, _word(0)
        try:
            reply = self._backend(_HERE).recv([answer], self._peer, tag + _ANSWER)
            header = self._backend(_HERE).send([_word(code)], self._peer, tag + _HEADER)
            body = self._backend(flat.device).send([flat], self._peer, tag + _BODY)
        except RuntimeError as error:
            raise self._roll.roll_call(str(error)) from error
        return Sending(self, code, answer, reply, header, body, flat.device)

    def recv(self, flat: torch.Tensor) -> Work:
        return self._asked.ask(flat)

    def _take(self, flat: torch.Tensor) -> None:
        tag, self._num_taken = self._num_taken * _NUM_TAGS, self._num_taken + 1
        code, header = Call("send", flat.numel(), flat.dtype).code, _word(0)
        self.watch(lambda: self._backend(_HERE).recv([header], self._peer, tag + _HEADER).wait())
        self.watch(lambda: self._backend(_HERE).send([_word(code)], self._peer, tag + _ANSWER).wait())
        self.compare(code, header)
        self.finish(lambda: self._backend(flat.device).recv([flat], self._peer, tag + _BODY).wait(), flat.device)

    def compare(self, code: int, word: torch.Tensor) -> None:
        if (theirs := int.from_bytes(bytes(word.tolist()), "little")) != code:
            raise disagreement(self._roll.rank, code, self._peer, theirs)

    def finish(self, wait: Callable[[], object], device: torch.device) -> None:
        """Wait for a body. On a GPU this only queues behind it, and belongs into the thread that owns the stream."""
        if device.type == "cuda":
            wait()
        else:
            self.watch(wait)

    def watch(self, wait: Callable[[], object]) -> None:
        """Do a blocking wait in a thread, and look for the lost meanwhile."""
        waiter, deadline = Waiter(wait), time.monotonic() + self._roll.timeout_seconds
        waiter.start()
        while waiter.is_alive():
            waiter.join(LOOK_SECONDS)
            if waiter.is_alive():
                self._roll.look_for_the_lost()
                if time.monotonic() >= deadline:
                    raise self._roll.silent([self._peer])
        if waiter.error is not None:
            raise self._roll.roll_call(str(waiter.error)) from waiter.error


class Sending:
    """A message on its way; received once the answer is here and agrees."""

    def __init__(
        self,
        letters: Letters,
        code: int,
        answer: torch.Tensor,
        reply: dist.Work,
        header: dist.Work,
        body: dist.Work,
        device: torch.device,
    ) -> None:
        self._letters, self._code, self._answer = letters, code, answer
        self._reply, self._header, self._body, self._device = reply, header, body, device

    def wait(self) -> None:
        self._letters.watch(self._reply.wait)
        self._letters.compare(self._code, self._answer)
        self._letters.watch(self._header.wait)
        self._letters.finish(self._body.wait, self._device)


class Waiter(threading.Thread):
    """A blocking wait that another thread can give up on. gloo ends it when the group is closed."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__(daemon=True, name="shoal-wait")
        self._wait = wait
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._wait()
        except Exception as error:
            self.error = error


def _word(code: int) -> torch.Tensor:
    return torch.tensor(list(code.to_bytes(8, "little")), dtype=torch.uint8)
