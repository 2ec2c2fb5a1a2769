"""Numbers of a run in trackio, which keeps them in files of its own on this machine."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from shoal.observe.exporters.settings import plain_settings
from shoal.observe.runs import RunInfo
from shoal.observe.scalars import Scalars, tag_of
from shoal.spec.event import Event


def open_exporter(run: RunInfo, place: str) -> "TrackioRun":
    return TrackioRun(run, place or "shoal")


class TrackioRun:
    """One run of trackio. It prints what it does; that is for people at a prompt, and kept from the terminal."""

    def __init__(self, run: RunInfo, project: str) -> None:
        with _quiet():
            import trackio

            self._run: Any = trackio.init(
                project=project,
                name=run.name,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                config={"command": run.command, "num_workers": run.num_workers},
            )

    def write(self, rows: Sequence[Scalars]) -> None:
        with _quiet():
            for row in rows:
                self._run.log({tag_of(name): value for name, value in row.values.items()}, step=row.step)

    def event(self, event: Event) -> None:
        if event.kind == "settings":
            for name, value in plain_settings(event).items():
                self._run.config[name] = value

    def close(self, status: str) -> None:
        with _quiet():
            import trackio

            # Not that of the run itself: then it would be finished once more, aloud, at the end of the process.
            trackio.finish()


def _quiet() -> contextlib.redirect_stdout[io.StringIO]:
    return contextlib.redirect_stdout(io.StringIO())
