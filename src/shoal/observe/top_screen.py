"""`shoal top`: the runs there are, live on a terminal."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TextIO

from shoal.observe.top import ORDERS, Reader, RunLine, Snapshot, newest_events, newest_log, sort_runs
from shoal.observe.top_text import Choice, Detail, Line, render, table_of

if TYPE_CHECKING:
    from curses import window as Window

PLAIN_SECONDS = 5.0
MAX_ONCE = 20
NUM_EVENTS = 30


def press(choice: Choice, key: str, snapshot: Snapshot, room: int) -> Choice | None:
    """What somebody sees after a key; None to quit. `room` is how many runs fit on the screen."""
    if key == "q" or key == "\x03":
        return None
    if choice.has_help:
        return replace(choice, has_help=False)
    if key == "?":
        return replace(choice, has_help=True)
    if key in ("p", " "):
        return replace(choice, is_paused=not choice.is_paused)
    if key == "l":
        return replace(choice, has_log=not choice.has_log)
    if choice.opened:
        return _press_in_run(choice, key)
    if key == "s":
        return replace(choice, order=ORDERS[(ORDERS.index(choice.order) + 1) % len(ORDERS)], top=0)
    if key in ("enter", "right") and choice.chosen:
        return replace(choice, opened=choice.chosen, top=0)
    return _move(choice, key, snapshot, room)


def _press_in_run(choice: Choice, key: str) -> Choice:
    if key in ("esc", "left", "backspace"):
        return replace(choice, opened="", top=0)
    by = {"down": 1, "j": 1, "up": -1, "k": -1, "page down": 10, "page up": -10, "g": -(10**9)}.get(key, 0)
    return replace(choice, top=max(0, choice.top + by))


def _move(choice: Choice, key: str, snapshot: Snapshot, room: int) -> Choice:
    names = [line.run.name for line in snapshot.runs]
    if not names:
        return choice
    place = names.index(choice.chosen) if choice.chosen in names else 0
    far = 10**9
    by = {"down": 1, "j": 1, "up": -1, "k": -1, "page down": room, "page up": -room, "g": -far, "G": far}.get(key, 0)
    place = min(len(names) - 1, max(0, place + by))
    return settle(replace(choice, chosen=names[place]), snapshot, room)


def settle(choice: Choice, snapshot: Snapshot, room: int) -> Choice:
    """The choice for these runs: one of them is chosen, and it is on the screen. A run that is gone is closed."""
    names = [line.run.name for line in snapshot.runs]
    if choice.opened:
        return choice if choice.opened in names else replace(choice, opened="", top=0)
    chosen = choice.chosen if choice.chosen in names else (names[0] if names else "")
    place = names.index(chosen) if chosen else 0
    top = min(max(choice.top, place - room + 1), place)
    return replace(choice, chosen=chosen, top=max(0, min(top, max(0, len(names) - room))))


def read_detail(line: RunLine | None, choice: Choice) -> Detail:
    if line is None:
        return Detail()
    if choice.has_log:
        return Detail(log=newest_log(line.run.path, NUM_EVENTS))
    return Detail(events=newest_events(line.run.path, NUM_EVENTS))


class Screen:
    """A terminal that curses draws on; only what has changed is sent, so nothing flickers."""

    def __init__(self, window: "Window", *, has_color: bool, is_ascii: bool) -> None:
        import curses

        self._curses, self._window, self.is_ascii = curses, window, is_ascii
        self._styles = {"bold": curses.A_BOLD, "dim": curses.A_DIM, "chosen": curses.A_REVERSE}
        self._styles |= {"good": 0, "warn": curses.A_BOLD, "bad": curses.A_BOLD}
        if has_color and curses.has_colors():
            curses.use_default_colors()
            colors = {"good": curses.COLOR_GREEN, "warn": curses.COLOR_YELLOW, "bad": curses.COLOR_RED}
            for pair, (style, color) in enumerate(colors.items(), start=1):
                curses.init_pair(pair, color, -1)
                self._styles[style] = curses.color_pair(pair)
        with contextlib.suppress(curses.error):  # it may not be possible to hide it here
            curses.curs_set(0)
        window.keypad(True)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows, as they are now. Curses is told: it hears of a change not everywhere by itself."""
        rows, cols = self._window.getmaxyx()
        with contextlib.suppress(OSError, ValueError, self._curses.error):
            now = os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else 1)
            if (now.columns, now.lines) != (cols, rows) and now.columns and now.lines:
                self._curses.resizeterm(now.lines, now.columns)
                self._window.clear()
                rows, cols = self._window.getmaxyx()
        return cols, rows

    def draw(self, lines: list[Line], *, is_anew: bool = False) -> None:
        window, (width, height) = self._window, self.size
        if is_anew:
            window.clear()
        window.erase()
        for row, line in enumerate(lines[:height]):
            col = 0
            for part in line:
                text = part.text.encode("ascii", "replace").decode() if self.is_ascii else part.text
                # Writing into the last cell moves the cursor out of the screen, which curses calls an error.
                room = width - col - (1 if row == height - 1 else 0)
                try:
                    window.addnstr(row, col, text, max(0, room), self._styles.get(part.style, 0))
                except (self._curses.error, ValueError):  # it became smaller at this moment
                    break
                col = window.getyx()[1]
        window.refresh()

    def key(self, seconds: float) -> str | None:
        """The next key, by its name; None where none was pressed in that time."""
        curses = self._curses
        self._window.timeout(max(0, math.ceil(1e3 * seconds)))
        try:
            code = self._window.get_wch()
        except curses.error:
            return None
        except KeyboardInterrupt:
            return "q"
        if isinstance(code, str):
            return {"\n": "enter", "\r": "enter", "\x1b": "esc", "\x7f": "backspace", "\b": "backspace"}.get(
                code, code
            )
        names = {curses.KEY_UP: "up", curses.KEY_DOWN: "down", curses.KEY_LEFT: "left", curses.KEY_RIGHT: "right"}
        names |= {curses.KEY_ENTER: "enter", curses.KEY_BACKSPACE: "backspace", curses.KEY_RESIZE: "resize"}
        names |= {
            curses.KEY_NPAGE: "page down",
            curses.KEY_PPAGE: "page up",
            curses.KEY_HOME: "g",
            curses.KEY_END: "G",
        }
        return names.get(code, "")


def watch(screen: Screen, reader: Reader, choice: Choice, every_seconds: float) -> None:
    """Show what there is until somebody quits."""
    snapshot, due, is_anew = reader.read(), time.monotonic() + every_seconds, False
    while True:
        width, height = screen.size
        room = max(1, height - 3)
        sorted_ones = replace(snapshot, runs=tuple(sort_runs(snapshot.runs, choice.order)))
        choice = settle(choice, sorted_ones, room)
        opened = next((line for line in snapshot.runs if line.run.name == choice.opened), None)
        detail = read_detail(opened, choice)
        lines = render(sorted_ones, choice, width, height, detail, is_ascii=screen.is_ascii)
        screen.draw(lines, is_anew=is_anew)
        is_anew = False
        key = screen.key(1.0 if choice.is_paused else max(0.0, due - time.monotonic()))
        if key in ("r", "\x0c", "resize"):
            is_anew = True
        elif key is not None:
            after = press(choice, key, sorted_ones, room)
            if after is None:
                return
            choice = after
        if time.monotonic() >= due and not choice.is_paused:
            snapshot = reader.read()
            due = time.monotonic() + every_seconds


def show(reader: Reader, opened: str, every_seconds: float, *, has_color: bool) -> int:
    """Take the terminal until somebody quits; it is given back as it was, whatever happens."""
    import curses
    import locale

    locale.setlocale(locale.LC_ALL, "")
    curses.set_escdelay(25)
    is_ascii = not (locale.getencoding() if hasattr(locale, "getencoding") else "utf-8").lower().startswith("utf")
    choice = Choice(chosen=opened, opened=opened)

    def run(window: "Window") -> None:
        watch(Screen(window, has_color=has_color, is_ascii=is_ascii), reader, choice, every_seconds)

    try:
        curses.wrapper(run)
    except KeyboardInterrupt:
        return 0
    return 0


def can_draw(stream: TextIO, term: str) -> bool:
    """Whether there is a terminal, and one that can move its cursor."""
    if not stream.isatty() or not sys.stdin.isatty() or term in ("", "dumb"):
        return False
    try:
        import curses

        curses.setupterm(term, stream.fileno())
    except Exception:  # curses.error, or no curses at all
        return False
    return bool(curses.tigetstr("cup"))


def print_once(reader: Reader, stream: TextIO, *, width: int, as_json: bool, name: str = "") -> None:
    """The same for scripts: running and newest runs, or one run with its ranks."""
    snapshot = reader.read()
    runs = [line for line in snapshot.runs if not name or line.run.name == name]
    shown = runs if as_json else [line for place, line in enumerate(runs) if line.is_running or place < MAX_ONCE]
    if as_json:
        facts = {"time": snapshot.time, "runs": [plain(line) for line in runs], "num_older": snapshot.num_older}
        stream.write(json.dumps(facts) + "\n")
    elif name and shown:
        lines = render(snapshot, Choice(opened=name), min(width, 500), 60, read_detail(shown[0], Choice()))
        text = ["".join(part.text for part in line).rstrip() for line in lines[1:-1]]
        stream.write("\n".join(text).rstrip() + "\n")
    elif shown:
        stream.write("\n".join(table_of(shown, width)) + "\n")
    else:
        lines = render(snapshot, Choice(), 200, 6)[2:4]
        stream.write("; ".join(part.text for line in lines for part in line) + "\n")
    stream.flush()


def plain(line: RunLine) -> dict[str, Any]:
    """All that is known of a run now, as JSON values."""
    facts = asdict(line)
    run = facts.pop("run")
    del run["facts"]
    return dict(_finite({**run, **facts, "memory": line.memory, "network": line.network}))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_again_and_again(
    reader: Reader, stream: TextIO, *, width: int, name: str, sleep: Callable[[float], None] = time.sleep
) -> int:
    """For a terminal that can only print: the table every few seconds, until Ctrl-C."""
    while True:
        stream.write(time.strftime("--- %H:%M:%S\n"))
        print_once(reader, stream, width=width, as_json=False, name=name)
        sleep(PLAIN_SECONDS)
