"""Rows of a trace file with their line numbers, and numbers out of them; mistakes name file, line and column."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.spec.errors import UserError


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `line` is where it stands in `path`, from 1."""

    path: Path
    line: int
    values: Mapping[str, Any]

    def text(self, column: str, otherwise: str | None = None) -> str:
        value = self.values.get(column)
        if value is None or value == "":
            if otherwise is None:
                raise self.error(column, "nothing is there")
            return otherwise
        return str(value)

    def number(
        self,
        column: str,
        otherwise: float | None = None,
        *,
        least: float = 0.0,
        above: float | None = None,
        most: float = math.inf,
    ) -> float:
        """A finite number of at least `least`, or greater than `above`, and at most `most`."""
        value = self.values.get(column)
        if (value is None or value == "") and otherwise is not None:
            return otherwise
        try:
            number = float(self.text(column))
        except ValueError:
            raise self.error(column, f"{str(value)!r} is not a number") from None
        if not math.isfinite(number):
            raise self.error(column, f"{value} is not a finite number")
        if not least <= number <= most or (above is not None and number <= above):
            limit = f"above {above:g}" if above is not None else f"{least:g} or more"
            limit = f"at most {most:g}" if number > most else limit
            raise self.error(column, f"{number:g} is out of range: {limit} is needed")
        return number

    def whole(self, column: str, otherwise: int | None = None, *, least: int = 0, most: float = math.inf) -> int:
        number = self.number(column, None if otherwise is None else float(otherwise), least=least, most=most)
        if number != int(number):
            raise self.error(column, f"{number:g} is not a whole number")
        return int(number)

    def error(self, column: str, why: str) -> UserError:
        return UserError(
            f"{self.path}, line {self.line}, column {column!r}: {why}.", hint="correct it, or leave the row out"
        )


def read_rows(path: Path, required: Sequence[str]) -> list[Row]:
    """The rows of a CSV file with a header, of a JSON list of objects, or of a file with one JSON object a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read.", why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text.", why=str(error), hint="traces are CSV or JSON files") from None
    read: Callable[[Path, str], Iterator[Row]] = _json if text.lstrip()[:1] in ("[", "{") else _csv
    rows = list(read(path, text))
    if not rows:
        raise UserError(f"{path} has no jobs.", hint="it needs at least one row after its header")
    missing = [name for name in required if name not in rows[0].values]
    if missing:
        has = ", ".join(map(str, rows[0].values)) or "none"
        raise UserError(f"{path} has no column {', '.join(map(repr, missing))}.", why=f"its columns are: {has}")
    return rows


def _csv(path: Path, text: str) -> Iterator[Row]:
    reader = csv.DictReader(text.splitlines())
    try:
        for values in reader:
            if None in values:
                raise UserError(
                    f"{path}, line {reader.line_num}: more cells than the header has columns.",
                    hint="put text with commas in quotes",
                )
            yield Row(path, reader.line_num, values)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}.", hint="traces are CSV or JSON files") from None


def _json(path: Path, text: str) -> Iterator[Row]:
    if text.lstrip().startswith("["):
        found = _parse(path, text, 1)
        pairs = list(enumerate(found, 1))
    else:
        lines = enumerate(text.splitlines(), 1)
        pairs = [(number, _parse(path, line, number)) for number, line in lines if line.strip()]
    for number, values in pairs:
        if not isinstance(values, dict):
            raise UserError(f"{path}, job {number}: not an object.", hint='each job is such as {"id": "a", ...}')
        yield Row(path, number, values)


def _parse(path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {line + error.lineno - 1}, column {error.colno}"
        raise UserError(f"{path}, {place}: {error.msg}.", hint="it has to be valid JSON") from None
