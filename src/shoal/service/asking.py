"""What may be submitted: plain values from a request, a file or a command become `Asked`, or are refused. Pure."""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.engine.fit import parse_bytes
from shoal.observe.clean import clean
from shoal.place.cluster import CLASSES
from shoal.service.job import Asked, check_gpus, parse_numbers
from shoal.service.settings import parse_duration
from shoal.spec.errors import UserError
from shoal.verb_parser import split_at_script, unknown

MAX_JOBS = 10_000
MAX_LINKS = 1_000_000
"""How often jobs of one submission may wait for others: all of one array for all of another is their product."""
MAX_TEXT = 200
MAX_ARGS = 1000
MAX_ARG_BYTES = 128 << 10
MAX_WORKERS = 100_000
MAX_PRIORITY = 1_000_000
_OURS = {
    "engine.cpus": "`--cores`",
    "engine.gpus": "`--gpus`",
    "engine.memory": "`--memory`",
    "engine.nodes": "`--partition` or `--kind`",
    "engine.start": "`-n MIN:MAX`",
}
_GIVEN = {
    "-n": "`workers`",
    "--num-workers": "`workers`",
    "--name": "`name`",
    **dict.fromkeys(("--engine", "--address", "--hosts", "--master", "--log-dir", "--resume"), ""),
}
"""Options of `shoal run` that the queue gives, and the field in which they are said, if they can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Jobs that are submitted together, all or none. `links` says which of them wait for which others of them."""

    jobs: tuple[Asked, ...]
    links: tuple[tuple[int, ...], ...]
    is_held: bool = False


def read_submission(body: Mapping[str, Any]) -> Submission:
    """The body of a request: `{"jobs": [{...}, ...], "held": false}`."""
    _check_known(body, ("jobs", "held"), "field")
    rows = body.get("jobs")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError("There is no job in the request.", hint='it has a list of them under "jobs"')
    asked: list[Asked] = []
    after: list[Sequence[Any]] = []
    for row in rows:
        count = _whole(row, "array", None, 1, MAX_JOBS)
        one = read_asked(row)
        if len(asked) + (count or 1) > MAX_JOBS:
            raise UserError(f"More than {MAX_JOBS} jobs at once.", hint="submit them in several parts")
        asked += [one] if count is None else [replace(one, index=index) for index in range(count)]
        after += [_list(row, "after")] * (count or 1)
    return link(asked, after, is_held=_flag(body, "held", False))


def link(asked: Sequence[Asked], after: Sequence[Sequence[Any]], *, is_held: bool = False) -> Submission:
    """Tell numbers of jobs that are there from names of jobs that come with them; a circle is an error."""
    names: dict[str, list[int]] = {}
    for place, one in enumerate(asked):
        names.setdefault(one.name, []).append(place)
    links: list[tuple[int, ...]] = []
    known: list[Asked] = []
    found: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    num_links = 0
    for one, words in zip(asked, after, strict=True):
        if id(words) not in found:  # those of an array have the same
            found[id(words)] = _numbers_and_places(words, names)
        outside, inside = found[id(words)]
        num_links += len(outside) + len(inside)
        if num_links > MAX_LINKS:
            raise UserError(
                f"These jobs wait for others more than {MAX_LINKS:,} times.",
                hint="put one job between: it is after the former, and the latter are after it",
            )
        known.append(replace(one, after=outside))
        links.append(inside)
    circle = find_circle(links)
    if circle:
        told = " after ".join(repr(clean(asked[place].name)) for place in circle)
        raise UserError("These jobs wait for each other, so none could ever start.", why=f"{told}")
    return Submission(jobs=tuple(known), links=tuple(links), is_held=is_held)


def _numbers_and_places(
    words: Sequence[Any], names: Mapping[str, list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a job waits for: numbers of jobs that are there, and places of those that come with it."""
    inside: list[int] = []
    outside: list[int] = []
    for word in words:
        if isinstance(word, str) and word in names:
            inside += names[word]
        else:
            outside += _job_numbers(word, names)
        if len(outside) > MAX_JOBS:
            raise UserError(f"A job waits for more than {MAX_JOBS} others.", hint="give it fewer in `after`")
    return tuple(dict.fromkeys(outside)), tuple(dict.fromkeys(inside))


def find_circle(links: Sequence[Sequence[int]]) -> list[int]:
    """Jobs that wait for each other in a circle, the first one again at the end; empty where there is none."""
    state = [0] * len(links)
    for root in range(len(links)):
        path: list[tuple[int, int]] = [(root, 0)] if state[root] == 0 else []
        while path:
            place, at = path[-1]
            state[place] = 1
            if at == len(links[place]):
                state[place] = 2
                path.pop()
                continue
            path[-1] = (place, at + 1)
            then = links[place][at]
            if state[then] == 1:
                walked = [one for one, _ in path]
                return [*walked[walked.index(then) :], then]
            if state[then] == 0:
                path.append((then, 0))
    return []


def _job_numbers(word: Any, names: Mapping[str, Any]) -> list[int]:
    """Jobs that are there: 17, "job-17", or a range such as "17-26"."""
    if isinstance(word, int) and not isinstance(word, bool) and 0 < word < 10**15:
        return [word]
    try:
        return parse_numbers([str(word)])
    except UserError:
        hint = "give the number of a job, a range such as 17-26, or the name of one in this file"
        raise unknown(str(word)[:60], "job", names, hint) from None


_FIELDS = ("args", "name", "dir", "env", "workers", "class", "priority", "partition", "account", "cores", "memory")
_MORE = ("gpus", "disk", "kinds", "data", "time", "after", "array", "preemptible", "max_preemptions")
MAX_DATA = 100


def read_asked(row: Mapping[str, Any]) -> Asked:
    """One job as people write it: `workers = "1:8"`, `memory = "4G"`, `time = "2h"`."""
    _check_known(row, (*_FIELDS, *_MORE), "field of a job")
    args = tuple(_texts(row, "args", MAX_ARGS, MAX_ARG_BYTES))
    if not script_of(args):
        raise UserError("No script was named.", hint="args has the script and its arguments")
    _check_options(args)
    folder = _text(row, "dir", "", 4096)
    if not os.path.isabs(folder) or "\0" in folder:
        raise UserError(
            f"dir {clean(folder)[:60]!r} is not a folder of the machine with the service.", hint="begin it with `/`"
        )
    least, most = parse_workers(row.get("workers", 1))
    job_class = _text(row, "class", "training")
    if job_class not in CLASSES:
        raise unknown(job_class[:60], "class", CLASSES, f"use one of: {', '.join(CLASSES)}")
    return Asked(
        run_args=args,
        name=check_name(_text(row, "name", "") or default_name(args)),
        working_dir=folder,
        env=_env(row),
        min_workers=least or most,
        max_workers=most,
        is_elastic=least is not None,
        job_class=job_class,
        priority=_whole(row, "priority", 0, -MAX_PRIORITY, MAX_PRIORITY) or 0,
        partition=_text(row, "partition", "default"),
        account=_account(row),
        cores=_number(row, "cores", 1.0, 100_000.0),
        memory_bytes=_size(row, "memory"),
        disk_bytes=_size(row, "disk"),
        gpus=_gpus(row, most),
        kinds=tuple(_texts(row, "kinds", 20, MAX_TEXT)),
        data=tuple(dict.fromkeys(_data(row, folder))),
        time_limit_seconds=_time(row),
        is_preemptible=_flag(row, "preemptible", True),
        max_preemptions=_whole(row, "max_preemptions", None, 0, MAX_PRIORITY),
    )


def script_of(args: Sequence[str]) -> str:
    """The script or module among arguments of `shoal run`; empty where there is none."""
    return next(iter(split_at_script(args)[1]), "")


def _check_options(args: Sequence[str]) -> None:
    """Raise UserError for options of a launcher that are the queue's to give: it counts what they ask for."""
    ours = split_at_script(args)[0]
    for flag, value in zip(ours, [*ours[1:], ""], strict=False):
        given = "-n" if flag.startswith("-n") else flag.partition("=")[0]
        if given in _GIVEN:
            raise UserError(
                f"A job in the queue cannot have `{given}` among its args.",
                why="the queue says that to its launcher",
                hint=f"say it with {_GIVEN[given]}" if _GIVEN[given] else "leave it out",
            )
        text = value if flag in ("-o", "--option") else flag.removeprefix("--option=").removeprefix("-o")
        name = text.partition("=")[0]
        if name in _OURS:
            raise UserError(
                f"A job in the queue cannot have `-o {name}`.",
                why="the queue chooses the machines, and keeps count of what is used on them",
                hint=f"say it with {_OURS[name]}",
            )


def default_name(args: Sequence[str]) -> str:
    """What a job is called that nobody named: its script."""
    name = clean(os.path.basename(script_of(args)))[:60].strip()
    return next((each for each in (name.removesuffix(".py"), name) if each and not each.isdecimal()), "job")


def check_name(name: str) -> str:
    if not name.isprintable() or not name.strip() or name != name.strip() or name.isdecimal():
        raise UserError(f"{clean(name)[:60]!r} cannot be the name of a job.", hint="use letters, digits and dashes")
    return name


def parse_workers(value: Any) -> tuple[int | None, int]:
    """`4` is (None, 4), `"1:8"` is (1, 8)."""
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() and len(part) <= 6 for part in parts):
        raise UserError(f"{str(value)[:40]!r} is not a number of workers.", hint='for example: 4, or "1:8"')
    numbers = [int(part) for part in parts]
    least, most = numbers[0], numbers[-1]
    if not 1 <= least <= most <= MAX_WORKERS:
        raise UserError(f"{text!r} is not a number of workers.", why=f"it may be 1 to {MAX_WORKERS}, the least first")
    return (least if len(parts) == 2 else None), most


def check_partition(asked: Asked, names: Collection[str]) -> None:
    if asked.partition not in names:
        raise unknown(asked.partition[:60], "partition", names, f"there are: {', '.join(sorted(names))}")


def _gpus(row: Mapping[str, Any], num_workers: int) -> float:
    gpus = _number(row, "gpus", 0.0, 100_000.0)
    check_gpus(gpus, num_workers)
    return gpus


def _account(row: Mapping[str, Any]) -> str:
    account = _text(row, "account", "")
    if not account.isprintable():
        raise UserError(f"account {clean(account)[:40]!r} cannot be used.", hint="such as lab, or lab/anna")
    return account


def _flag(row: Mapping[str, Any], name: str, default: bool) -> bool:
    value = row.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"{name} is {str(value)[:40]!r}.", why="it may be true or false, without quotes")
    return value


def _data(row: Mapping[str, Any], folder: str) -> Iterator[str]:
    """Files and folders that it reads, from the root; relative ones are in its folder."""
    for path in _texts(row, "data", MAX_DATA, MAX_ARG_BYTES):
        if not path or "://" in path:
            raise UserError(
                f"data {clean(path)[:60]!r} is not a path on a machine.", hint="for example: /data/images"
            )
        yield os.path.normpath(os.path.join(folder, path))


def _size(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, 0)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60:
        return value
    size = parse_bytes(value[:40]) if isinstance(value, str) else -1
    if not 0 <= size < 1 << 60:
        raise UserError(f"{name} {str(value)[:40]!r} is not a size.", hint='for example: "4G"')
    return size


def _time(row: Mapping[str, Any]) -> float | None:
    value = row.get("time")
    return None if value is None else parse_duration(str(value)[:40], "a time limit")


def _env(row: Mapping[str, Any]) -> dict[str, str]:
    env = row.get("env", {})
    if not isinstance(env, dict) or len(env) > MAX_ARGS:
        raise UserError("env is to be a table of texts.")
    for name, value in env.items():
        is_text = isinstance(name, str) and isinstance(value, str)
        if not is_text or not name or "=" in name or "\0" in name + value or len(name) + len(value) > MAX_ARG_BYTES:
            raise UserError(
                f"The variable {clean(str(name))[:60]!r} cannot be set.",
                why="its name is empty or has `=` in it, or it is no text, or too long",
            )
    return dict(env)


def _text(row: Mapping[str, Any], name: str, default: str, most: int = MAX_TEXT) -> str:
    value = row.get(name, default)
    if not isinstance(value, str) or len(value) > most:
        why = f"it has {len(value)} characters, and may have {most}" if isinstance(value, str) else "it is not a text"
        raise UserError(f"{name} {clean(str(value)[:40])!r} cannot be used.", why=why)
    return value


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name, [])
    if not isinstance(value, list) or len(value) > MAX_ARGS:
        raise UserError(f"{name} is to be a list.", why=f"of at most {MAX_ARGS}")
    return value


def _texts(row: Mapping[str, Any], name: str, most: int, most_bytes: int) -> list[str]:
    values = _list(row, name)
    if not all(isinstance(value, str) and "\0" not in value for value in values):
        raise UserError(f"{name} is to be a list of texts.")
    if len(values) > most or sum(map(len, values)) > most_bytes:
        raise UserError(f"{name} is too long.", why=f"at most {most} texts, together {most_bytes} characters")
    return values


def _whole(row: Mapping[str, Any], name: str, default: int | None, least: int, most: int) -> int | None:
    value = row.get(name, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(f"{name} is {str(value)[:40]!r}.", why=f"it may be a whole number from {least} to {most}")
    return value


def _number(row: Mapping[str, Any], name: str, default: float, most: float) -> float:
    value = row.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value <= most:
        raise UserError(f"{name} is {str(value)[:40]!r}.", why=f"it may be a number from 0 to {most:g}")
    return float(value)


def _check_known(row: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name in row:
        if name not in known:
            raise unknown(str(name)[:60], what, known, f"there are: {', '.join(known)}")
