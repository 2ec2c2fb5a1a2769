"""How every verb reads its options, and what it says of those that it does not know."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from shoal.spec.errors import UserError

Options = Sequence[tuple[tuple[str, ...], dict[str, Any]]]

RUN_OPTIONS: Options = (
    (
        ("-n", "--num-workers"),
        {
            "metavar": "N|MIN:MAX|auto",
            "default": None,
            "help": "how many workers (default: 1, or all slots of the hosts); with MIN:MAX they may come and go",
        },
    ),
    (("-m", "--module"), {"action": "store_true", "help": "SCRIPT is a module, as with `python -m`"}),
    (("--python",), {"metavar": "PATH", "help": "interpreter of the workers (default: this one)"}),
    (
        ("--env",),
        {"metavar": "K[=V]", "action": "append", "help": "a variable for the workers; without =V as it is here"},
    ),
    (
        ("--engine",),
        {
            "metavar": "NAME",
            "help": "local, ray, mpi or spark (default: what the next three options say, else local)",
        },
    ),
    (("--address",), {"metavar": "HOST:PORT", "help": "the Ray cluster (default: the one that this machine is in)"}),
    (
        ("--hosts",),
        {
            "metavar": "A:2,B:2",
            "help": "hosts for mpirun, each with its number of slots (default: those of the Slurm job)",
        },
    ),
    (("--master",), {"metavar": "URL", "help": "the Spark master"}),
    (("--threads",), {"metavar": "N", "help": "threads of each worker (default: cores / workers)"}),
    (("--framework",), {"metavar": "NAME", "default": "torch", "help": "torch (the default), tensorflow or jax"}),
    (("--log-dir",), {"metavar": "DIR|URL", "help": "the run folder (default: ~/.shoal/runs/NAME)"}),
    (("--name",), {"metavar": "NAME", "help": "name of the run (default: made of time and script)"}),
    (("--resume",), {"metavar": "RUN", "help": "go on with a run, in its folder; SCRIPT may be left out"}),
    (("-o", "--option"), {"metavar": "K=V", "action": "append", "help": "an option of shoal; may be repeated"}),
    (("--faults",), {"metavar": "FILE", "help": "what is to go wrong on purpose, as JSON: see docs/faults.md"}),
    (
        ("--to",),
        {"metavar": "TOOL[:PLACE]", "action": "append", "help": "send the numbers there too: see docs/exporting.md"},
    ),
    (("--json",), {"action": "store_true", "help": "in the end print a summary as JSON; output goes to stderr"}),
    (("--quiet",), {"action": "store_true", "help": "show nothing but errors; logs are written all the same"}),
)
"""What `shoal run` takes before the script."""


def unknown(word: str, kind: str, known: Iterable[str], otherwise: str) -> UserError:
    """A word that means nothing here: what was probably meant, or `otherwise`."""
    from difflib import get_close_matches

    if word.endswith(".py"):
        return UserError(f"There is no {kind} {word!r}.", hint=f"to start a script: `shoal run {word}`")
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return UserError(f"There is no {kind} {word!r}.", hint=f"did you mean `{close[0]}`?" if close else otherwise)


class Parser(argparse.ArgumentParser):
    """Says mistakes as every other part of shoal does."""

    def __init__(self, verb: str, about: str, usage: str) -> None:
        super().__init__(
            prog=f"shoal {verb}",
            description=about,
            usage=f"shoal {verb} {usage}",
            allow_abbrev=False,
            # Looking for the width itself, argparse imports a module that takes longer than all the rest of it.
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100),
        )

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ").split()[0]
        if message.startswith("unrecognized") and word.startswith("-"):
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            raise unknown(word.partition("=")[0], "option", flags, f"`{self.prog} --help` lists them")
        raise UserError(f"{self.prog}: {message}.", hint=f"`{self.prog} --help` says how it is used")


def parse_count(text: str, flag: str, otherwise: str = "") -> int:
    try:
        number = int(text)
    except ValueError:
        raise UserError(f"{flag} {text!r} is not a number.", hint=f"give it a whole number{otherwise}") from None
    if number < 1:
        raise UserError(f"{flag} is {number}.", why="at least 1 is needed", hint=f"give it 1 or more{otherwise}")
    return number


def add_address(parser: Parser) -> None:
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="the cluster (default: the one that this machine is in); http:// works"
    )


def split_at_script(argv: Sequence[str], known: Options = RUN_OPTIONS) -> tuple[list[str], list[str]]:
    """Our own options, and the script with everything that is the script's. `--` may stand between them."""
    with_value = {flag for flags, settings in known if settings.get("action") != "store_true" for flag in flags}
    place = 0
    while place < len(argv) and argv[place].startswith("-") and argv[place] != "-":
        if argv[place] == "--":
            return list(argv[:place]), list(argv[place + 1 :])
        place += 2 if argv[place] in with_value else 1
    return list(argv[:place]), list(argv[place:])
