"""`python -m benchmarks NAME [--json] [--save] [--rounds N]`: NAME is a module here with a `main`, or `all`."""

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks import harness

_NOT_BENCHMARKS = {"__init__", "__main__", "harness"}


def names() -> list[str]:
    """Modules beside this one that have a `main(rounds, is_quick)`."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if file.stem not in _NOT_BENCHMARKS and "def main(rounds" in file.read_text()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure against the peers.")
    parser.add_argument("name", choices=[*names(), "all"], metavar="NAME", help=f"one of: {', '.join(names())}, all")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-NAME.json")
    parser.add_argument("--rounds", type=int, default=7, help=f"interleaved rounds, at least {harness.MIN_ROUNDS}")
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)  # tiny: shows that it runs
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="PEER=PATH", help="a peer's own Python: deepspeed=PATH"
    )
    parser.add_argument(
        "--clean-minutes", type=float, default=30.0, metavar="M", help="diagnose: minutes of runs without a fault"
    )
    options = parser.parse_args()
    harness.CLEAN_MINUTES = options.clean_minutes
    harness.PEER_PYTHONS.update(pair.split("=", 1) for pair in options.peer_python)
    if options.rounds < harness.MIN_ROUNDS and not options.quick:
        parser.error(f"--rounds must be at least {harness.MIN_ROUNDS}: fewer say nothing about the spread")
    harness.keep_priority()
    for name in names() if options.name == "all" else [options.name]:
        module = importlib.import_module(f"benchmarks.{name}")
        result = harness.record(name, module.main(options.rounds, options.quick))
        print(json.dumps(result) if options.json else harness.render(result), flush=True)
        if options.save:
            print(f"saved {harness.save(result)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
