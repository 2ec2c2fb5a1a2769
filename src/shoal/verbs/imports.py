"""`shoal import`: runs of other tools, beside our own."""

import sys
import time
from collections.abc import Callable
from random import SystemRandom

from shoal.engine.env import shoal_home
from shoal.observe.clean import clean
from shoal.observe.importing import as_json, import_tensorboard
from shoal.observe.status import count
from shoal.observe.tfevents import Reading
from shoal.verb_parser import Parser, unknown

SHOW_SECONDS = 0.5
TOOLS = ("tensorboard",)


def main(argv: list[str]) -> int:
    """What `shoal import tensorboard FOLDER` does; returns the exit code."""
    parser = Parser("import", "Make runs of another tool's files.", "tensorboard FOLDER [--json]")
    parser.add_argument("tool", metavar="TOOL", help="tensorboard")
    parser.add_argument("folder", metavar="FOLDER", help="what you give to `tensorboard --logdir`")
    parser.add_argument("--json", action="store_true", help="say as JSON what was made")
    options = parser.parse_args(argv)
    if options.tool not in TOOLS:
        raise unknown(options.tool, "tool to import from", TOOLS, "use `tensorboard`")
    results = import_tensorboard(shoal_home(), options.folder, SystemRandom(), _progress())
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if options.json:
        sys.stdout.write(as_json(results) + "\n")
    else:
        for result in results:
            source = clean(result.source)
            if result.name is None:
                sys.stdout.write(f"{source}: nothing made: {clean(result.why)}\n")
            else:
                words = f"{result.num_steps} steps, {result.num_numbers} numbers of {result.num_names} names"
                sys.stdout.write(f"{clean(result.name)}  {words}  from {source}\n")
            for note in result.notes:
                sys.stderr.write(f"shoal: {clean(note)}\n")
    return 0 if any(result.name for result in results) else 1


def _progress() -> Callable[[str, Reading], None] | None:
    if not sys.stderr.isatty():
        return None
    shown = [0.0]

    def show(source: str, reading: Reading) -> None:
        if time.monotonic() >= shown[0] + SHOW_SECONDS:
            shown[0] = time.monotonic()
            words = f"{count(reading.num_numbers)} numbers, {reading.num_bytes / 1e6:.0f} MB read"
            sys.stderr.write(f"\r\x1b[K{words}  {clean(source)[-60:]}")
            sys.stderr.flush()

    return show
