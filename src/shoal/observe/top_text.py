"""The screen of `shoal top` as text. Pure: a snapshot and what is chosen in it in, lines with styles out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.observe.clean import clean, columns, fit, last_state, one_line
from shoal.observe.status import count, duration, number
from shoal.observe.top import ORDERS, NodeLine, RankLine, RunLine, Snapshot
from shoal.spec.event import Event

LEAST_WIDTH, LEAST_HEIGHT = 20, 5
NOTE_WIDTH = 14
LEAST_WAIT = 0.05
"""A rank that waits for a smaller part of its steps waits for nobody in particular."""
STALE_SECONDS = 10.0
"""A run whose newest step is older than this, and than ten of its steps, is marked."""


class Part(NamedTuple):
    """A stretch of a line. Styles: bold, dim, good, bad, warn, chosen; none is plain."""

    text: str
    style: str = ""


Line = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What somebody wants to see. `chosen` is the name of a run; `opened` the one whose ranks are shown, if any."""

    chosen: str = ""
    opened: str = ""
    order: str = ORDERS[0]
    is_paused: bool = False
    has_log: bool = False
    has_help: bool = False
    top: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """What is shown of one run beside its numbers."""

    events: Sequence[Event] = ()
    log: Sequence[tuple[int, str]] = ()


class Column(NamedTuple):
    """One fact about each run. Those that do not fit on the screen are left out, the last ones first."""

    title: str
    text: Callable[[RunLine], str]
    is_number: bool = True


def optional(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def size(num_bytes: float) -> str:
    """Bytes in few characters: `850M`, `1.2G`."""
    for unit, scale in (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10)):
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return f"{num_bytes:.0f}"


def milliseconds(seconds: float) -> str:
    """A step's time: `16.4ms`, `1.24s`."""
    if seconds >= 1.0:
        return f"{seconds:.3g}s" if seconds < 1000 else duration(seconds)
    return f"{1e3 * seconds:.3g}ms"


def _workers(line: RunLine) -> str:
    run = line.run
    have = len(line.members) if line.members is not None else run.num_workers
    return "" if have is None else f"{have}" if run.max_workers is None else f"{have}/{run.max_workers}"


def _steps(line: RunLine) -> str:
    if line.items is not None:
        return f"{line.items[0]}" if line.items[1] is None else f"{line.items[0]}/{line.items[1]}"
    return optional(line.step, str)


def _cpu(line: RunLine) -> str:
    known = [rank.cpu for rank in line.ranks if rank.cpu is not None]
    return f"{sum(known):.1f}" if known else ""


_COLUMNS = (
    Column("STATUS", lambda line: clean(line.run.status), is_number=False),
    Column("W", _workers),
    Column("STEP", _steps),
    Column("LOSS", lambda line: optional(line.loss, number)),
    Column("A STEP", lambda line: optional(line.step_seconds, milliseconds)),
    Column("SPEED", lambda line: optional(line.samples_per_second, count)),
    Column("MEM", lambda line: optional(line.memory, size)),
    Column("NET/S", lambda line: optional(line.network, size)),
    Column("TIME", lambda line: optional(line.seconds, duration)),
    Column("CPU", _cpu),
    Column("COMMAND", lambda line: one_line(line.run.command), is_number=False),
)


def render(
    snapshot: Snapshot,
    choice: Choice,
    width: int,
    height: int,
    detail: Detail | None = None,
    *,
    is_ascii: bool = False,
) -> list[Line]:
    """Exactly `height` lines, none wider than `width`; the last one has the keys."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return [(Part(fit("too small", width)),)] + [()] * (height - 1)
    opened = next((line for line in snapshot.runs if line.run.name == choice.opened), None)
    room = height - 2
    if choice.has_help:
        body = _help()
    elif opened is not None:
        body = _run(opened, detail or Detail(), choice, width, room, is_ascii=is_ascii)
    else:
        body = _list(snapshot, choice, width, room)
    body = [*body[:room], *[()] * (room - len(body))]
    lines = [_head(snapshot, choice), *body, _keys(choice, is_open=opened is not None, width=width)]
    return [cut(line, width) for line in lines]


def cut(line: Line, width: int) -> Line:
    """As much of a line as fits."""
    parts, used = [], 0
    for part in line:
        text = fit(part.text, width - used)
        used += columns(text)
        if text:
            parts.append(Part(text, part.style))
        if text != part.text:
            break
    return tuple(parts)


def _head(snapshot: Snapshot, choice: Choice) -> Line:
    running = [line for line in snapshot.runs if line.is_running]
    workers = sum(len(line.ranks) for line in running)
    ended = len(snapshot.runs) - len(running) + snapshot.num_older
    text = f"  {len(running)} running with {workers} worker{'s' * (workers != 1)}, {ended} ended"
    paused = Part("  PAUSED", "warn") if choice.is_paused else Part("")
    order = Part(f"  by {choice.order}", "dim") if choice.order != ORDERS[0] and not choice.opened else Part("")
    return (Part("shoal top", "bold"), Part(text), order, paused)


def _list(snapshot: Snapshot, choice: Choice, width: int, room: int) -> list[Line]:
    if not snapshot.runs:
        place = clean(snapshot.home)
        return [(), (Part(f"no runs in {place}"),), (Part("start one with `shoal run SCRIPT`", "dim"),)]
    visible = snapshot.runs[choice.top : choice.top + room - 1]
    table = table_of(visible, width)
    shown: list[Line] = []
    for line, text in zip(visible, table[1:], strict=True):
        style = "chosen" if line.run.name == choice.chosen else style_of(line, snapshot.time)
        shown.append((Part(text + " " * (width - columns(text)) if style == "chosen" else text, style),))
    if snapshot.num_older and len(shown) < room - 1:
        shown.append((Part(f"and {snapshot.num_older:,} older runs: `shoal ps --all`", "dim"),))
    return [(Part(table[0], "bold"),), *shown]


def style_of(line: RunLine, now: float) -> str:
    if line.run.status in ("failed", "lost"):
        return "bad"
    if not line.is_running:
        return "dim"
    usual = 10.0 * (line.step_seconds or 0.0)
    return "warn" if line.since is not None and line.since > max(STALE_SECONDS, usual) else ""


def table_of(lines: Sequence[RunLine], width: int) -> list[str]:
    """A title and a line for each run. The name has what it needs, at most a quarter; other columns as they fit."""
    cells = [[column.title, *(column.text(line) for line in lines)] for column in _COLUMNS]
    names = ["RUN", *(clean(line.run.name) for line in lines)]
    wanted = max(map(columns, names), default=3)
    texts = [_fit_end(name, min(wanted, max(12, width // 4))) for name in names]
    used = max(map(columns, texts))
    texts = [text + " " * (used - columns(text)) for text in texts]
    for column, cell in zip(_COLUMNS, cells, strict=True):
        if not any(cell[1:]):
            continue
        room = max(map(columns, cell))
        if column.title == "COMMAND":
            room = min(room, max(0, width - used - 2))
        if used + 2 + room > width or room < min(5, len(column.title)):
            continue
        used += 2 + room
        for index, text in enumerate(cell):
            text = fit(text, room)
            blank = " " * (room - columns(text))
            texts[index] += "  " + (blank + text if column.is_number else text + blank)
    return [text.rstrip() for text in texts]


def _fit_end(text: str, width: int) -> str:
    """A name of a run ends with what tells it from others, so its beginning goes first."""
    if columns(text) <= width:
        return text
    while text and columns(text) >= width:
        text = text[1:]
    return "…" + text


def _run(line: RunLine, detail: Detail, choice: Choice, width: int, room: int, *, is_ascii: bool) -> list[Line]:
    run = line.run
    status = Part(clean(run.status) + (f" ({run.exit_code})" if run.exit_code else ""), _status_style(line))
    head: list[Line] = [(Part(clean(run.name), "bold"), Part("  "), status), (Part(_facts(line)),)]
    head.append((Part(fit(one_line(run.command), width), "dim"),))
    if line.history:
        bars = spark(line.history[-max(1, width - 40) :], is_ascii=is_ascii)
        longest = milliseconds(max(line.history))
        head.append((Part("step times  "), Part(bars, "good"), Part(f"  longest {longest}", "dim")))
    head += [(Part(_node(node)),) for node in line.nodes]
    ranks = _ranks(line, width, is_ascii=is_ascii)
    rest = room - len(head) - 2
    nothing: list[Line] = [(Part("nothing was printed yet", "dim"),)]
    low = (_log(detail.log) or nothing) if choice.has_log else _events(detail.events, line)
    for_low = min(len(low), max(rest // 3, rest - len(ranks) - 1))
    low = low[-for_low:] if for_low > 0 else []
    title = "last lines of logs" if choice.has_log else "last events"
    space = rest - len(low)
    first = max(0, min(choice.top, len(ranks) - space))
    shown = ranks[:1] + ranks[1 + first : space + first]
    if len(ranks) > space > 1:
        hidden = len(ranks) - len(shown)
        shown[-1:] = [(Part(f"and {hidden + 1} more ranks (j, k)", "dim"),)]
    return [*head, (), *shown, *([(Part(title, "bold"),)] if low else []), *low]


def _status_style(line: RunLine) -> str:
    return {"running": "good", "failed": "bad", "lost": "bad"}.get(line.run.status, "dim")


def _facts(line: RunLine) -> str:
    parts = [
        f"step {line.step}" if line.step is not None else "",
        f"loss {number(line.loss)}" if line.loss is not None else "",
        f"{milliseconds(line.step_seconds)} a step" if line.step_seconds else "",
        f"{count(line.samples_per_second)} samples/s" if line.samples_per_second else "",
        f"{_workers(line)} workers" if _workers(line) else "",
        duration(line.seconds) if line.seconds is not None else "",
        f"newest step {duration(line.since)} ago" if line.since is not None and line.since > STALE_SECONDS else "",
    ]
    return "  ".join(part for part in parts if part)


def _node(node: NodeLine) -> str:
    parts = [clean(node.node)]
    if node.cpu is not None:
        parts.append(f"cpu {node.cpu:.1f}" + (f" of {node.cores:.0f} cores" if node.cores else ""))
    if node.memory_used is not None:
        parts.append(
            f"memory {size(node.memory_used)}" + (f" of {size(node.memory_total)}" if node.memory_total else "")
        )
    if node.net_in is not None:
        parts.append(f"network {size(node.net_in)}/s in, {size(node.net_out or 0.0)}/s out")
    if node.disk_free is not None:
        parts.append(f"disk {size(node.disk_free)} free")
    return "  ".join(parts)


_SIGNS = {"compute": "█", "communicate": "▓", "wait": "░", "load": "▒"}
_ASCII_SIGNS = {"compute": "#", "communicate": "=", "wait": ".", "load": "-"}


def _ranks(line: RunLine, width: int, *, is_ascii: bool) -> list[Line]:
    """A title and a line for each rank; the one that others wait for is marked."""
    if not line.ranks:
        return [(Part("no steps recorded yet" if line.is_running else "no steps were recorded", "dim"),)]
    slow = find_slow(line.ranks)
    has_system = any(rank.rss is not None for rank in line.ranks)
    title = f"{'RANK':>4} {'STEP':>8} {'TIME':>7} {'COMP':>5} {'COMM':>5} {'WAIT':>5} {'LOAD':>5} {'SAMPLES':>7}"
    title += f" {'CPU':>5} {'MEM':>6}" if has_system else ""
    bar_width = min(40, width - len(title) - 2 - NOTE_WIDTH)
    lines: list[Line] = [(Part(title, "bold"),)]
    for rank in line.ranks:
        text = f"{rank.rank:>4} {rank.step:>8} {milliseconds(rank.step_seconds):>7}"
        text += "".join(f" {f'{100 * share:.0f}%':>5}" for share in rank.shares.values()) + f" {rank.num_samples:>7}"
        if has_system:
            text += f" {optional(rank.cpu, lambda cpu: f'{cpu:.1f}'):>5} {optional(rank.rss, size):>6}"
        bar = bar_of(rank, bar_width, is_ascii=is_ascii) if bar_width >= 8 else ""
        style = "dim" if not rank.is_member else "warn" if rank.rank == slow else ""
        note = "  away" if not rank.is_member else "  waited for" if rank.rank == slow else ""
        is_waiting = rank.waited_for is not None and rank.shares["wait"] > LEAST_WAIT
        note = f"  waits for {rank.waited_for}" if not note and is_waiting else note
        lines.append((Part(text, style), Part(f"  {bar}" if bar else ""), Part(note, style or "dim")))
    return lines


def find_slow(ranks: Sequence[RankLine]) -> int | None:
    """The rank that others wait for most, if they wait at all."""
    waits: dict[int, float] = {}
    for rank in ranks:
        if rank.waited_for is not None and rank.shares["wait"] > LEAST_WAIT:
            waits[rank.waited_for] = waits.get(rank.waited_for, 0.0) + rank.shares["wait"]
    return max(waits, key=lambda rank: waits[rank]) if waits else None


def bar_of(rank: RankLine, width: int, *, is_ascii: bool) -> str:
    """Where the time of a rank goes, as a bar."""
    signs = _ASCII_SIGNS if is_ascii else _SIGNS
    bar = "".join(sign * round(rank.shares[name] * width) for name, sign in signs.items())[:width]
    return bar + " " * (width - len(bar))


def spark(values: Sequence[float], *, is_ascii: bool) -> str:
    """Values as a row of bars, from zero to the largest."""
    signs = " .:-=+*#" if is_ascii else "▁▂▃▄▅▆▇█"
    top = max(values, default=0.0) or 1.0
    return "".join(signs[min(7, max(0, int(8 * value / top)))] if value == value else "?" for value in values)


def _events(events: Sequence[Event], line: RunLine) -> list[Line]:
    lines: list[Line] = []
    for event in events:
        if event.kind in _NOT_NEWS:
            continue
        who = "" if event.rank is None else f"rank {event.rank}"
        step = "" if event.step is None else f"step {event.step}"
        data = ", ".join(
            f"{name} {_brief(value)}" for name, value in event.data.items() if value not in (None, "", [])
        )
        text = f"{duration(event.time - line.run.created):>8}  {who:8} {step:10} {one_line(event.kind)}  {data}"
        is_bad = event.kind in ("error", "worker_lost", "worker_hung", "worker_frozen", "fault", "alert")
        lines.append((Part(text, "warn" if is_bad else ""),))
    return lines


_NOT_NEWS = frozenset({"settings", "worker_settings", "clock", "piece"})


def _brief(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_brief, value[:8])) + ("]" if len(value) <= 8 else ", ...]")
    text = one_line(str(value)[:200])
    return fit(text, 60)


def _log(log: Sequence[tuple[int, str]]) -> list[Line]:
    return [
        (Part(f"[{rank}] ", "dim"), Part(clean(last_state(text.rstrip("\r\n"))).expandtabs(4))) for rank, text in log
    ]


_LIST_KEYS = (("q", "quit"), ("↑↓", "select"), ("enter", "open"), ("s", "sort"), ("p", "pause"), ("?", "help"))
_RUN_KEYS = (("q", "quit"), ("esc", "back"), ("↑↓", "ranks"), ("l", "log"), ("p", "pause"), ("?", "help"))


def _keys(choice: Choice, *, is_open: bool, width: int) -> Line:
    if choice.has_help:
        pairs: Sequence[tuple[str, str]] = (("any key", "back"),)
    else:
        pairs = _RUN_KEYS if is_open else _LIST_KEYS
    parts: list[Part] = []
    for key, what in pairs:
        parts += [Part(f" {key} ", "chosen"), Part(f" {what}  ")]
    return tuple(parts)


def _help() -> list[Line]:
    keys = (
        ("q", "quit"),
        ("j k, arrows", "select a run; in a run, scroll its ranks"),
        ("page up, page down, g, G", "far up and down, first, last"),
        ("enter, right", "open a run: its ranks, machines and last events"),
        ("esc, left, backspace", "back to the list"),
        ("s", f"sort by: {', '.join(ORDERS)}"),
        ("l", "last log lines instead of last events"),
        ("p, space", "pause, and go on"),
        ("r, ctrl-l", "draw again"),
    )
    text: list[Line] = [(), (Part("keys", "bold"),)]
    text += [(Part(f"  {key:26}", "good"), Part(what)) for key, what in keys]
    text += [(), (Part("parts of a step", "bold"),)]
    text += [(Part("  compute: forward, backward   comm: moving and summing gradients"),)]
    text += [(Part("  wait: for other ranks        load: for data"),)]
    return text
