"""The journal of a run: one event a line, appended by every process that takes part."""

# msgspec 0.22 imports it too, and crashes later if Ctrl-C came meanwhile; not needed once it looks for errors there.
import datetime  # noqa: F401
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import msgspec

from shoal.observe.lines import Report, say_nothing
from shoal.observe.segments import Bound, BoundedAppender, SegmentReader
from shoal.spec.event import Event

MAX_LINE_BYTES = 4096
_TEXT_LIMITS = (2048, 512, 128, 32)


def encode(event: Event, max_bytes: int | None = None) -> bytes:
    """The event as JSON in one line, without the newline.

    NaN and infinities, which JSON does not have, become the words "nan", "inf" and "-inf"; objects that JSON does not
    know become their text. Where the line would be longer than `max_bytes`, long texts lose their middle and long
    lists their end, and `data` says `"truncated": true`.
    """
    plain = event if _is_plain(event) else replace(event, kind=to_plain(event.kind[:64]), data=to_plain(event.data))
    line = _encoder.encode(plain)
    if max_bytes is None or len(line) < max_bytes:
        return line
    for limit in _TEXT_LIMITS:
        shorter = replace(plain, data={**_shorten(plain.data, limit), "truncated": True})
        line = _encoder.encode(shorter)
        if len(line) < max_bytes:
            return line
    return _encoder.encode(replace(plain, data={"truncated": True}))


def _is_plain(event: Event) -> bool:
    """Whether an event needs no care: short words and finite numbers only, like the progress sent all the time."""
    for value in event.data.values():
        kind = type(value)
        if kind is float or kind is int:
            if not -1e300 < value < 1e300 or (kind is int and abs(value) >= 1 << 63):
                return False
        elif value is not None:
            return False
    return event.kind.isascii() and len(event.kind) <= 64


def to_plain(value: Any, depth: int = 8) -> Any:
    """Anything as values that JSON has: non-finite numbers and unknown objects become text."""
    if value is None or isinstance(value, bool | int):
        return value if not isinstance(value, int) or abs(value) < 1 << 63 else str(value)
    if isinstance(value, str):
        # Lone surrogates, as in file names that are not UTF-8, cannot be encoded.
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > 0 and isinstance(value, Mapping):
        return {to_plain(str(key)): to_plain(item, depth - 1) for key, item in value.items()}
    if depth > 0 and isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item, depth - 1) for item in value]
    return to_plain(_describe(value))


def _describe(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # a user's __str__ may do anything; the journal must not fall over it
        return f"<{type(value).__name__} whose text failed: {type(error).__name__}>"


def _shorten(value: Any, limit: int) -> Any:
    if isinstance(value, str) and len(value) > limit:
        # The end of a traceback says more than its start.
        head, tail = limit // 4, limit - limit // 4
        return f"{value[:head]} ... {value[-tail:]}"
    if isinstance(value, dict):
        return {key[:64]: _shorten(item, limit) for key, item in list(value.items())[:64]}
    if isinstance(value, list):
        return [_shorten(item, limit) for item in value[: max(4, limit // 32)]]
    return value


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event, strict=False)


def decode(line: bytes | str) -> Event | None:
    """The event of one line, or None where the line is not one: torn, or not ours."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read(path: str, on_damage: Callable[[bytes], None] | None = None) -> Iterator[Event]:
    """The events of a journal in the order they were appended; none where there is no such file.

    Of long ago only what is worth keeping is there, see `fold`. Lines that cannot be read, such as a last one that
    was cut by a crash, are skipped and given to `on_damage`.
    """
    file = SegmentReader(path)
    for block in file.read_new():
        yield from _events_in(block.lines, on_damage)
    yield from _events_in(file.rest, on_damage)


def _events_in(lines: bytes, on_damage: Callable[[bytes], None] | None = None) -> Iterator[Event]:
    for line in lines.split(b"\n"):
        event = decode(line) if line and not line.isspace() else None
        if event is not None:
            yield event
        elif on_damage and line and not line.isspace():
            on_damage(line)


class JournalReader:
    """Reads the journal of a run while it is being written. `num_damaged` counts lines nobody could read."""

    def __init__(self, run_dir: str) -> None:
        self._file = SegmentReader(os.path.join(run_dir, "journal.jsonl"))
        self._newest = -math.inf
        self.num_damaged = 0

    def read_new(self) -> list[Event]:
        """What was appended since the last call."""
        events: list[Event] = []
        for block in self._file.read_new():
            found = list(_events_in(block.lines, self._count))
            # Who was away for long gets all of the past, and knows some of it already.
            events = [event for event in found if event.time > self._newest] if block.is_past else events + found
        self._newest = max((event.time for event in events), default=self._newest)
        return events

    def _count(self, line: bytes) -> None:
        self.num_damaged += 1


def fold(past: bytes, segment: bytes) -> bytes:
    """The past with one more part of the journal in it, thinned as far as it must be. Pure.

    Of the kind that takes the most room every second event goes, but for its first and last ten; important kinds
    count only a sixteenth of their size, so that they go last. An event `thinned` at the start says how many of
    each kind are gone.
    """
    lines: list[tuple[str, bytes]] = []
    gone: Counter[str] = Counter()
    first = 0.0
    for line in [*past.split(b"\n"), *segment.split(b"\n")]:
        event = decode(line) if line else None
        if event is None:
            continue
        if event.kind == "thinned":
            gone.update({str(kind): int(count) for kind, count in event.data.get("gone", {}).items()})
        else:
            lines.append((event.kind, line))
        first = first or event.time
    lines, dropped = _thin(lines, PAST_BYTES)
    gone.update(dropped)
    note = Event(kind="thinned", time=first, data={"gone": dict(gone.most_common(50))})
    kept = [line for _, line in lines]
    return b"".join(line + b"\n" for line in ([encode(note, MAX_LINE_BYTES), *kept] if gone else kept))


def _thin(lines: list[tuple[str, bytes]], max_bytes: int) -> tuple[list[tuple[str, bytes]], Counter[str]]:
    places: dict[str, list[int]] = {}
    for place, (kind, _) in enumerate(lines):
        places.setdefault(kind, []).append(place)
    sizes = {kind: sum(len(lines[place][1]) + 1 for place in found) for kind, found in places.items()}
    gone: Counter[str] = Counter()
    while sum(sizes.values()) > max_bytes:
        long = [kind for kind, found in places.items() if len(found) > 2 * NUM_ENDS + 1]
        if not long:
            break
        kind = max(long, key=lambda kind: sizes[kind] / (16 if kind in IMPORTANT else 1))
        found = places[kind]
        places[kind] = [*found[:NUM_ENDS], *found[NUM_ENDS:-NUM_ENDS:2], *found[-NUM_ENDS:]]
        gone[kind] += len(found) - len(places[kind])
        sizes[kind] = sum(len(lines[place][1]) + 1 for place in places[kind])
    kept = sorted(place for found in places.values() for place in found)
    while kept and sum(len(lines[place][1]) + 1 for place in kept) > max_bytes:
        # Very many kinds: only the newest of them.
        half = len(kept) // 2 + 1
        gone.update(lines[place][0] for place in kept[:half])
        kept = kept[half:]
    return [lines[place] for place in kept], gone


NUM_ENDS = 10
IMPORTANT = frozenset(
    ("run_started", "run_ended", "world", "worker_lost", "worker_joined", "worker_frozen", "worker_hung", "resumed")
    + (
        "settings",
        "goal",
        "worker_settings",
        "error",
        "alert",
        "fault",
        "checkpoint_saved",
        "checkpoint_failed",
        "relearning",
    )
    + ("state_rebuilt", "replica_diverged", "rebalanced", "resized", "step_skipped", "worker_exited", "clock")
)
PAST_BYTES = 4 << 20
BOUND = Bound(segment_bytes=2 << 20, num_sealed=2, fold=fold)
"""The newest 4 to 6 MB as they were; of all before, what fits into 4 MB."""


class Journal:
    """Appends events to one file. Many processes and threads may hold a Journal on the same file.

    Nothing it does raises into the run: a failing disk is reported once through `report` and writing resumes when the
    disk works again. Events that meet a failing disk are lost; `write` says so by returning False.
    """

    def __init__(self, path: str, report: Report = say_nothing) -> None:
        self._file = BoundedAppender(path, BOUND, report)

    def write(self, event: Event) -> bool:
        """Append one event as one line of at most 4 KB; costs a few microseconds and one system call."""
        line = encode(event, MAX_LINE_BYTES) + b"\n"
        return self._file.append(line) == len(line)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
