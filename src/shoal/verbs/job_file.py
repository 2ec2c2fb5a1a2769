"""`job.toml`: one job or several, as `shoal submit` reads them. Mistakes are told with their line."""

import os
import re
from collections.abc import Mapping
from typing import Any

from shoal.service.asking import read_asked, read_submission
from shoal.service.openapi import JOB_FIELDS
from shoal.service.settings import parse_toml
from shoal.spec.errors import UserError
from shoal.verb_parser import unknown

MAX_FILE_BYTES = 8 << 20


def read_job_file(path: str, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """The jobs of a file, and whether they are to be held. What is `given` on the command line goes before it."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except FileNotFoundError:
        raise UserError(f"There is no file {path!r}.", hint="docs/service.md has an example of one") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path} is not TOML.", where=f"{path}:{line}", why="it is not UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read.", why=error.strerror or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path} is too large.", why=f"it may have {MAX_FILE_BYTES >> 20} MiB")
    return parse_jobs(text, path, given)


def parse_jobs(text: str, path: str, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Fields at the top are those of the one job; with `[[jobs]]` they are what all of these begin with. Pure."""
    top = dict(parse_toml(text, path))
    held = top.pop("held", False)
    if not isinstance(held, bool):
        raise UserError("held is to be true or false.", where=_place(text, path, "held", None))
    inner = top.pop("jobs", None)
    if inner is not None and (not isinstance(inner, list) or not all(isinstance(row, dict) for row in inner)):
        raise UserError("jobs is to be a list of tables.", where=_place(text, path, "jobs", None), hint="[[jobs]]")
    base = os.path.dirname(os.path.abspath(path))
    if inner is not None:
        _check(top, text, path, None)
    rows = []
    for number, own in [(None, {})] if inner is None else enumerate(inner):
        _check(top if inner is None else own, text, path, number)
        row = {**top, **own, **given}
        row["dir"] = os.path.join(base, os.path.expanduser(row.get("dir", "")) or ".")
        row["dir"] = os.path.normpath(row["dir"])
        if not row.get("args"):
            where = path if number is None else f"{path}, job {number + 1} of {len(inner or ())}"
            raise UserError(
                "No script was named.", where=where, hint='for example: args = ["train.py", "--epochs", "3"]'
            )
        rows.append(row)
    if not rows:
        raise UserError(f"There is no job in {path}.", hint="docs/service.md has an example")
    read_submission({"jobs": rows, "held": held})
    return rows, held


def _check(fields: Mapping[str, Any], text: str, path: str, number: int | None) -> None:
    """Each field on its own, so that the line of the first wrong one can be told."""
    for name, value in fields.items():
        try:
            if name not in JOB_FIELDS:
                raise unknown(name[:60], "field of a job", JOB_FIELDS, f"there are: {', '.join(JOB_FIELDS)}")
            if name == "dir":
                if not isinstance(value, str):
                    raise UserError(f"dir {value!r} cannot be used.", why="it is not a text")
            elif name == "array":
                read_submission({"jobs": [{"args": ["x"], "dir": "/", "array": value}]})
            else:
                read_asked({"args": ["x"], "dir": "/", name: value})
        except UserError as error:
            raise error.at(where=_place(text, path, name, number)) from None


def _place(text: str, path: str, name: str, number: int | None) -> str:
    """Where a field stands, as `file:line:column`: at the top, or in the table of a job. Pure."""
    key = re.compile(rf"""(\s*)(?:"{re.escape(name)}"|'{re.escape(name)}'|{re.escape(name)})\s*[=.]""")
    head = re.compile(rf"\s*\[+\s*(?:jobs\s*\.\s*)?{re.escape(name)}\s*\]")
    at = None
    count = -1
    for line_number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*jobs\s*\]\]", line):
            count += 1
            at = count
        found = key.match(line)
        if at == number and (found or head.match(line)):
            return f"{path}:{line_number}:{len(found[1]) + 1 if found else 1}"
    return path
