"""Messages between two ranks of a host: two boxes for each pair and direction, filled and emptied in turn.

On a pair's first line the sender counts the boxes it filled, on the second the receiver those it emptied. The sender
names its call in the first line; a receiver that expected something else throws the message away, leaves its own call
and the message's number in the second line, and both raise.
"""

import threading

import torch

from shoal.comm.asked import Asked
from shoal.comm.blocks import cut_blocks
from shoal.comm.board import CALL, PLACE, Board
from shoal.comm.group import Call, Work, disagreement

BOX_BYTES = 256 << 10


class Pairs:
    """This rank's messages. `boxes[r]` is the memory rank r sends from: two boxes for each receiver."""

    def __init__(self, board: Board, boxes: list[torch.Tensor]) -> None:
        self.board, self.boxes = board, boxes
        self._out = [Outbox(self, peer) for peer in range(board.size)]
        self._in = [Inbox(self, peer) for peer in range(board.size)]

    def send(self, flat: torch.Tensor, to: int) -> Work:
        return self._out[to].send(flat)

    def recv(self, flat: torch.Tensor, source: int) -> Work:
        return self._in[source].recv(flat)

    def close(self) -> None:
        """Let go of the memory. Boxes on their way in or out refer to each other, and may stay for a while."""
        self.boxes = []

    def box(self, source: int, to: int, number: int) -> torch.Tensor:
        begin = (2 * to + (number & 1)) * BOX_BYTES
        return self.boxes[source][begin : begin + BOX_BYTES]


class Outbox:
    """What goes to one rank. `filled` counts boxes, `messages` messages, both from one."""

    def __init__(self, pairs: Pairs, to: int) -> None:
        self.pairs, self.board, self.to = pairs, pairs.board, to
        self.line = self.board.pair_line(self.board.rank, to, is_answer=False)
        self.answers = self.board.pair_line(self.board.rank, to, is_answer=True)
        self.filled, self.messages = 0, 0
        self.latest: Sending | None = None

    def send(self, flat: torch.Tensor) -> Work:
        """Fill the boxes now if they are free, else in a thread, after the messages before this one."""
        first, self.messages = self.filled + 1, self.messages + 1
        pieces = _pieces(flat)
        self.filled += len(pieces)
        work = Sending(self, Call("send", flat.numel(), flat.dtype).code, self.messages, first, pieces, self.latest)
        if (self.latest is None or self.latest.is_done) and self.board.words[self.answers] >= self.filled - 2:
            work.run()
        else:
            work.start()
        self.latest = work
        return work


class Sending(threading.Thread):
    """One message on its way. Runs as a thread only if it cannot finish at once."""

    def __init__(
        self, box: Outbox, code: int, message: int, first: int, pieces: list[torch.Tensor], before: "Sending | None"
    ) -> None:
        super().__init__(daemon=True, name=f"shoal-send-{box.to}")
        self._box, self._code, self._message, self._first, self._pieces = box, code, message, first, pieces
        self._before = before
        self._error: Exception | None = None
        self.is_done = False

    def run(self) -> None:
        try:
            if self._before is not None and self._before.is_alive():
                self._before.join()
            self._fill()
        except Exception as error:
            self._error = error
        self.is_done, self._before = True, None

    def _fill(self) -> None:
        box, board = self._box, self._box.board
        for number, piece in enumerate(self._pieces, start=self._first):
            board.wait_line(box.to, box.answers, number - 2)
            if number == self._first:
                board.words[box.line + CALL + (self._message & 1)] = self._code
            box.pairs.box(board.rank, box.to, number)[: len(piece)].copy_(piece)
            board.raise_line(box.line, number)

    def wait(self) -> None:
        """Return when the message was received."""
        box, board = self._box, self._box.board
        if self.is_alive():
            self.join()
        if self._error is not None:
            raise self._error
        board.wait_line(box.to, box.answers, self._first + len(self._pieces) - 1)
        if board.words[box.answers + CALL] == self._message:
            raise disagreement(board.rank, self._code, box.to, board.words[box.answers + PLACE])


class Inbox:
    """What comes from one rank."""

    def __init__(self, pairs: Pairs, source: int) -> None:
        self.pairs, self.board, self.source = pairs, pairs.board, source
        self.line = self.board.pair_line(source, self.board.rank, is_answer=False)
        self.answers = self.board.pair_line(source, self.board.rank, is_answer=True)
        self.emptied, self.messages = 0, 0
        self._asked = Asked(self._take)

    def recv(self, flat: torch.Tensor) -> Work:
        return self._asked.ask(flat)

    def _take(self, flat: torch.Tensor) -> None:
        board, code = self.board, Call("send", flat.numel(), flat.dtype).code
        self.messages += 1
        board.wait_line(self.source, self.line, self.emptied + 1)
        theirs = board.words[self.line + CALL + (self.messages & 1)]
        if theirs != code:
            self._refuse(code, theirs)
        for piece in _pieces(flat):
            self.emptied += 1
            board.wait_line(self.source, self.line, self.emptied)
            piece.copy_(self.pairs.box(self.source, board.rank, self.emptied)[: len(piece)])
            board.raise_line(self.answers, self.emptied)

    def _refuse(self, code: int, theirs: int) -> None:
        """Count all of their boxes as emptied, tell the sender what we wanted, and raise."""
        call = Call.of(theirs)
        self.emptied += len(cut_blocks(slice(0, call.numel * call.dtype.itemsize), BOX_BYTES))
        self.board.words[self.answers + PLACE] = code
        self.board.words[self.answers + CALL] = self.messages
        self.board.raise_line(self.answers, self.emptied)
        raise disagreement(self.board.rank, code, self.source, theirs)


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    """A message as bytes, a box at a time; an empty one is one empty piece."""
    data = flat.view(torch.uint8)
    return [data[part] for part in cut_blocks(slice(0, len(data)), BOX_BYTES)]
