"""How every verb reads its options, and what it says of those that it does not know."""

import argparse
from collections.abc import Iterable
from typing import NoReturn

from shoal.spec.errors import UserError


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
