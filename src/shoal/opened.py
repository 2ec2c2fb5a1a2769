"""Runs to look at from Python and from a notebook: numbers as a data frame, events, and a plot."""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.engine.env import shoal_home
from shoal.observe import journal
from shoal.observe.runs import RunInfo, find_run, list_runs, read_run
from shoal.observe.scalars import ScalarsReader
from shoal.observe.table import Table
from shoal.spec.errors import UserError
from shoal.spec.event import Event

if TYPE_CHECKING:
    from shoal.observe.explain import Explanation

LIBRARIES = ("polars", "pandas")


class Run:
    """One run, as its folder tells it: read anew with every call, so that one that goes on grows.

    Made by `shoal.open_run` and `shoal.runs`.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def path(self) -> str:
        """The run folder."""
        return self._info.path

    @property
    def status(self) -> str:
        """As `shoal ps` shows it: `running`, `finished`, `failed`, `stopped`, `lost` or `imported`."""
        return self._read().status

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says: command, job, versions, host, ..."""
        return dict(self._read().facts)

    def frame(self, library: str | None = None, *, names: Sequence[str] | None = None) -> Any:
        """The numbers of the run as a data frame: a row a step, with `step`, `time` and a column for each name.

        `library` is "polars" or "pandas"; left out, it is polars where that is installed. `names` picks columns.
        Numbers that a step does not have are null (pandas: NaN). What `shoal.log` got has columns as well.
        """
        columns = self._table().columns()
        if names is not None:
            if missing := [name for name in names if name not in columns]:
                raise UserError(
                    f"Run {self.name} has no numbers called {missing[0]!r}.",
                    why=f"it has {', '.join(list(columns)[2:12]) or 'none'}",
                    hint="look at `run.frame().columns`",
                )
            columns = {name: columns[name] for name in dict.fromkeys(("step", "time", *names))}
        return _make_frame(columns, library)

    def events(self, kind: str | None = None) -> list[Event]:
        """What happened, in order; of one kind, if that is said. Kinds are listed in docs/glossary.md."""
        found = journal.read(os.path.join(self.path, "journal.jsonl"))
        return [event for event in found if kind is None or event.kind == kind]

    def explain(self) -> "Explanation":
        """What `shoal explain` says. Printed, it is text."""
        from shoal.observe.explain import explain

        return explain(self.path)

    def __repr__(self) -> str:
        return f"<shoal run {self.name}, {self.status}>"

    def _repr_html_(self) -> str:
        """For notebooks: what became of it, and its loss as a picture. No script; text of the run is never markup."""
        from shoal.observe.plot import run_html

        return run_html(self._read(), self._table().columns(), time.time())

    def _read(self) -> RunInfo:
        return read_run(self.path) or self._info

    def _table(self) -> Table:
        return Table(ScalarsReader(self.path).read_rest())


def open_run(name: str = "last") -> Run:
    """The run of that name, to look at: the beginning or end of a name, a path, or `last`, as `shoal ps` lists them.

    Raises UserError where there is none, or several fit.
    """
    if not isinstance(name, str | os.PathLike):
        raise UserError(f"{name!r} is not the name of a run.", hint='for example: `shoal.open_run("last")`')
    return Run(find_run(shoal_home(), os.fspath(name)))


def runs() -> list[Run]:
    """All runs there are, the newest first."""
    return [Run(info) for info in list_runs(shoal_home())]


def _make_frame(columns: dict[str, Any], library: str | None) -> Any:
    if library not in (None, *LIBRARIES):
        raise UserError(f"There is no library {library!r} for frames.", hint='use "polars" or "pandas"')
    for name in [library] if library else LIBRARIES:
        try:
            if name == "polars":
                import polars

                kinds = {column: polars.Int64 if column == "step" else polars.Float64 for column in columns}
                return polars.DataFrame(columns, schema=kinds)
            import pandas

            frame = pandas.DataFrame(columns)
            return frame.astype({column: "float64" for column in columns if column != "step"})
        except ImportError:
            continue
    wanted = library or "polars"
    hint = "run `pip install 'shoal[features]'`" if wanted == "polars" else "run `pip install pandas`"
    raise UserError(f"{wanted} is not installed.", why="a frame is one of polars or of pandas", hint=hint)
