"""The journal of a run: one event a line, appended by every process that takes part."""

# msgspec 0.22 imports it too, and crashes later if Ctrl-C came meanwhile; not needed once it looks for errors there.
import datetime  # noqa: F401
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import msgspec

from shoal.observe.lines import Appender, Report, say_nothing
from shoal.spec.event import Event

MAX_LINE_BYTES = 4096
_TEXT_LIMITS = (2048, 512, 128, 32)


class Journal:
    """Appends events to one file. Many processes and threads may hold a Journal on the same file.

    Nothing it does raises into the run: a failing disk is reported once through `report` and writing resumes when the
    disk works again. Events that meet a failing disk are lost; `write` says so by returning False.
    """

    def __init__(self, path: str, report: Report = say_nothing) -> None:
        self._file = Appender(path, report)

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

    Lines that cannot be read, such as a last one that was cut by a crash, are skipped and given to `on_damage`.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; a missing file must not look like a failing read
    except OSError:
        return
    with file:
        for line in file:
            event = decode(line) if not line.isspace() else None
            if event is not None:
                yield event
            elif on_damage and not line.isspace():
                on_damage(line)
