"""Numbers of a run as TensorBoard event files."""

import os
from collections.abc import Sequence
from typing import Any

from shoal.observe.runs import RunInfo
from shoal.observe.scalars import Scalars, tag_of
from shoal.spec.errors import UserError
from shoal.spec.event import Event


def open_exporter(run: RunInfo, place: str) -> "TensorBoardFiles":
    return TensorBoardFiles(place or os.path.join(run.path, "tensorboard"))


class TensorBoardFiles:
    """Writes with the package's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        try:
            self._writer = EventFileWriter(folder)
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(f"Cannot write TensorBoard files to {folder}.", why=why, hint="check it") from error

    def write(self, rows: Sequence[Scalars]) -> None:
        for row in rows:
            self._writer.add_event(_event(row))
        self._writer.flush()

    def event(self, event: Event) -> None:
        """TensorBoard has no place for events."""

    def close(self, status: str) -> None:
        self._writer.close()


def _event(row: Scalars) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event as FileEvent
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag_of(name), simple_value=value) for name, value in row.values.items()]
    return FileEvent(wall_time=row.time, step=row.step, summary=Summary(value=values))
