"""What people see while a run goes on: the output of all workers in one stream, and one progress line below it."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from shoal.observe.clean import RESET, clean, columns, fit, last_state
from shoal.observe.fold import Fold, Group, name_ranks
from shoal.observe.status import progress_text
from shoal.spec.event import Event

DRAW_SECONDS = 0.08
PLAIN_SECONDS = 10.0
MAX_PARTIAL_BYTES = 1 << 16
_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_ERASE_LINE = "\r\x1b[K"


class Console:
    """Shows lines of workers with their rank, notes, and progress, on one stream.

    Feed it with `feed` (raw bytes of a worker) or `line`; call `tick` at the latest when `next_tick` says. Equal
    lines of several ranks within 0.15 s become one; that is also the longest a line is held back. With one worker
    nothing is held back and there is no prefix.

    On a terminal the last row shows progress; it is erased, written below, and drawn again with every print. The
    cursor is never hidden and no mode is changed, so even `kill -9` leaves the terminal usable. Elsewhere progress is
    a plain line every 10 s. A stream that breaks (closed terminal, `| head`) is not written again, and never raises.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        num_workers: int = 1,
        has_prefix: bool | None = None,
        is_tty: bool | None = None,
        use_color: bool | None = None,
        width: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_tty = stream.isatty() if is_tty is None else is_tty
        self._stream = stream
        self._use_color = self.is_tty if use_color is None else use_color
        self._width = width or (lambda: terminal_width(stream))
        self._clock = clock
        self._lock = threading.RLock()
        self._is_open = True
        self._has_prefix = num_workers > 1 if has_prefix is None else has_prefix
        self._fold = Fold(num_workers)
        self._partial: dict[int, bytes] = {}
        self._partial_rank = -1
        self._progress: dict[int, dict[str, Any]] = {}
        self._is_progress_new = False
        self._drawn_columns = 0
        self._is_mid_line = False
        self._next_draw = 0.0
        self._next_plain: float | None = None
        self._prefixes: dict[tuple[int, ...], str] = {}

    def feed(self, rank: int, data: bytes) -> None:
        """Take raw output of a worker, cut anywhere. Only complete lines are printed."""
        with self._lock:
            head, newline, rest = (self._partial.pop(rank, b"") + data).rpartition(b"\n")
            # Of a progress bar only the newest state is kept: it may go on for hours without a newline.
            rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
            if len(rest) > MAX_PARTIAL_BYTES:
                head, newline, rest = head + newline + rest, b"\n", b""
            if rest:
                self._partial[rank], self._partial_rank = rest, rank
                self._is_progress_new |= not self._progress
            if newline:
                self._add(rank, head.decode("utf-8", "replace").split("\n"))
            else:
                self._draw_if_due()

    def line(self, rank: int, text: str) -> None:
        """Print one line of a worker."""
        with self._lock:
            self._add(rank, (text,))

    def begin(self, rank: int) -> None:
        """A worker that was not there from the start has begun."""
        with self._lock:
            self._fold.begin()

    def lose(self, rank: int) -> None:
        """A worker has ended and the others go on: what it did last is soon not the progress of the run."""
        with self._lock:
            self.end(rank)
            if rank in self._progress:
                self._progress[rank]["is_lost"] = True

    def end(self, rank: int) -> None:
        """A worker has ended: print what it left without a newline, and wait for its lines no longer."""
        with self._lock:
            rest = self._partial.pop(rank, b"")
            self._fold.end()
            if rest:
                self._add(rank, (rest.decode("utf-8", "replace"),))
            self.tick()

    def note(self, text: str) -> None:
        """Print something of our own, after every line that came before it. May be several lines."""
        with self._lock:
            lines = self._format(self._fold.drain())
            lines += [clean(line, keep_color=self._use_color) for line in text.split("\n")]
            self._print(lines)

    def progress(self, event: Event) -> None:
        """Take the newest progress of one rank; it is drawn now or with the next tick."""
        with self._lock:
            self._progress[event.rank or 0] = {"step": event.step, "generation": event.generation, **event.data}
            self._is_progress_new = True
            self._draw_if_due()

    def tick(self) -> None:
        """Print and draw what is due."""
        with self._lock:
            groups = self._fold.take(self._clock())
            if groups:
                self._print(self._format(groups))
            else:
                self._draw_if_due()

    def next_tick(self) -> float | None:
        """Seconds until `tick` has something to do, or None where nothing is held back."""
        with self._lock:
            due = [self._fold.next_deadline()]
            if self._is_progress_new:
                due.append(self._next_draw if self.is_tty else self._next_plain)
            known = [moment for moment in due if moment is not None]
            return max(0.0, min(known) - self._clock()) if known else None

    def give_way(self, stream: TextIO, text: str) -> int:
        """Let this process itself print `text` on `stream`: the progress line goes first and comes back later."""
        with self._lock:
            if self._drawn_columns:
                self._write(self._erasure())
                self._is_progress_new = True
            if text:
                self._is_mid_line = not text.endswith("\n")
            return stream.write(text)

    def renew_lock(self) -> None:
        """For a child after a fork: the lock may be held by a thread that does not exist here."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Print everything held back, leave the last progress on a line of its own, and write no more."""
        with self._lock:
            if not self._is_open:
                return
            for rank in list(self._partial):
                self._fold.add(rank, self._show(self._partial.pop(rank).decode("utf-8", "replace")), self._clock())
            lines = self._format(self._fold.drain())
            if self._progress and (self.is_tty or self._is_progress_new):
                lines.append(progress_text(self._progress, self._width() - 1 if self.is_tty else None))
            self._progress.clear()
            start = "\n" if self._is_mid_line and lines else self._erasure()
            self._write(start + "".join(f"{line}\n" for line in lines))
            self._is_open = False

    def _add(self, rank: int, lines: Iterable[str]) -> None:
        if not self._has_prefix:
            self._print([self._show(line) for line in lines])
            return
        now = self._clock()
        for line in lines:
            self._fold.add(rank, line if line.isprintable() else self._show(line), now)
        self._print(self._format(self._fold.take(now)))

    def _show(self, line: str) -> str:
        return clean(last_state(line), keep_color=self._use_color)

    def _format(self, groups: list[Group]) -> list[str]:
        if not self._has_prefix:
            return [group.text for group in groups]
        return [self._prefix(tuple(group.ranks)) + group.text for group in groups]

    def _prefix(self, ranks: tuple[int, ...]) -> str:
        known = self._prefixes.get(ranks)
        if known is None:
            known = f"[{name_ranks(ranks)}] "
            if self._use_color:
                color = _COLORS[ranks[0] % len(_COLORS)] if len(ranks) == 1 else 2
                known = f"\x1b[{color}m{known}{RESET}"
            # Orders of arrival are many where ranks are; the memory of them is not worth more than this.
            if len(self._prefixes) < 4096:
                self._prefixes[ranks] = known
        return known

    def _print(self, lines: list[str]) -> None:
        if lines:
            text = self._erasure() + "\n".join(lines) + "\n"
            self._is_progress_new |= bool(self._progress or self._partial)
            # One write for both, so that the progress line does not flicker; in a flood of lines it may lag.
            self._write(text + self._drawing() if self._is_draw_due() else text)

    def _draw_if_due(self) -> None:
        if self._is_draw_due():
            self._write(self._erasure() + self._drawing())

    def _is_draw_due(self) -> bool:
        if not self._is_progress_new or self._is_mid_line:
            return False
        now = self._clock()
        if self.is_tty:
            return now >= self._next_draw
        if self._progress and self._next_plain is None:
            self._next_plain = now + PLAIN_SECONDS
        return self._next_plain is not None and now >= self._next_plain

    def _drawing(self) -> str:
        now = self._clock()
        self._is_progress_new = False
        if not self.is_tty:
            self._next_plain = now + PLAIN_SECONDS
            return progress_text(self._progress) + "\n"
        self._next_draw = now + DRAW_SECONDS
        # The last column stays free: writing into it would wrap on some terminals.
        text = self._status(self._width() - 1)
        self._drawn_columns = columns(text)
        return text

    def _status(self, width: int) -> str:
        if self._progress:
            return progress_text(self._progress, width)
        rest = self._partial.get(self._partial_rank)
        if rest is None:
            return ""
        # No progress of our own, but a worker's bar or prompt: show its newest state.
        text = clean(last_state(rest.decode("utf-8", "replace"))).strip()
        return fit(f"[{self._partial_rank}] {text}" if self._has_prefix else text, width)

    def _erasure(self) -> str:
        if not self._drawn_columns:
            return ""
        # A terminal that became narrower has wrapped the line into several rows.
        rows = (self._drawn_columns - 1) // max(1, self._width())
        self._drawn_columns = 0
        return f"\r\x1b[{rows}A\x1b[J" if rows else _ERASE_LINE

    def _write(self, text: str) -> None:
        if not self._is_open or not text:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody reads any more. The run goes on; everything is in the logs of the run folder.
            self._is_open = False


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal behind a stream right now; 80 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80
