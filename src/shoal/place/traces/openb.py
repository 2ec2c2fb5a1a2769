"""The openb lists of a production GPU cluster (nodes, and pods that share GPUs), as nodes and asks of ours."""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shoal.place.cluster import Ask, Node, Queued
from shoal.place.traces.plain import PlainWork
from shoal.spec.errors import UserError

MIB = 2**20
NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec")
TIME_COLUMNS = ("creation_time", "deletion_time", "scheduled_time")


def read_nodes(path: Path) -> tuple[Node, ...]:
    """The machines of a node list; the model of their GPUs is the kind of the node."""
    return tuple(
        Node(
            name=row["sn"],
            kind=row["model"] or "cpu",
            cores=number("cpu_milli") / 1000,
            memory_bytes=number("memory_mib") * MIB,
            gpus=number("gpu"),
        )
        for row, number in _rows(path, NODE_COLUMNS)
    )


def read_pods(path: Path) -> tuple[Ask, ...]:
    """What each pod of a list asks for, in the order of the file. Every pod is one worker."""
    return tuple(_ask(path, row, number) for row, number in _rows(path, POD_COLUMNS))


def read_pod_jobs(path: Path, *, is_length_known: bool = True) -> list[PlainWork]:
    """The pods of a list as jobs of one worker, each as long as its pod ran: until it was deleted."""
    work = []
    for row, number in _rows(path, (*POD_COLUMNS, *TIME_COLUMNS)):
        came = number("creation_time")
        # Pods that never got a node were deleted while they waited; so long they are said to take.
        began = number("scheduled_time") if row["scheduled_time"] else came
        queued = Queued(id=row["name"], ask=_ask(path, row, number), submitted_at=float(came))
        work.append(PlainWork(queued, max(number("deletion_time") - began, 1.0), 1, is_length_known))
    return work


def _ask(path: Path, row: Mapping[str, str], number: Callable[[str], int]) -> Ask:
    gpus, milli = number("num_gpu"), number("gpu_milli")
    if gpus and not 0 < milli <= 1000:
        raise UserError(f"{path}: pod {row['name']} asks for {milli} thousandths of a GPU; 1 to 1000 are possible.")
    if gpus > 1 and milli != 1000:
        raise UserError(
            f"{path}: pod {row['name']} asks for shares of {gpus} GPUs.",
            why="a worker has a share of one GPU, or whole ones",
        )
    return Ask(
        cores=number("cpu_milli") / 1000,
        memory_bytes=number("memory_mib") * MIB,
        gpus=gpus if milli == 1000 else gpus * milli / 1000,
        kinds=frozenset(kind for kind in row["gpu_spec"].split("|") if kind),
    )


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[Mapping[str, str], Callable[[str], int]]]:
    """Each row, and what reads a whole number out of it; mistakes name file, line and column."""
    try:
        file = path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"{path} cannot be read.", why=error.strerror or str(error)) from None
    with file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise UserError(
                f"{path} has no column {', '.join(map(repr, missing))}.",
                why=f"its columns are: {', '.join(reader.fieldnames or ()) or 'none'}",
                hint="openb lists begin with a header; node lists and pod lists are different files",
            )
        for row in reader:

            def number(column: str, row: Mapping[str, str] = row, line: int = reader.line_num) -> int:
                text = row.get(column) or ""
                if not text.isdecimal():
                    raise UserError(f"{path}, line {line}, column {column!r}: {text!r} is no whole number from 0.")
                return int(text)

            if any(row.get(column) is None for column in columns):
                raise UserError(f"{path}, line {reader.line_num}: the row is cut short.")
            yield row, number
