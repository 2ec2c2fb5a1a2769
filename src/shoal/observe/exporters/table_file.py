"""What files that hold a whole table share: they are replaced whole, now and then, and in the end."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence

from shoal.observe.scalars import Scalars
from shoal.observe.table import Table
from shoal.spec.errors import UserError
from shoal.spec.event import Event

Columns = Mapping[str, Sequence[int] | Sequence[float] | Sequence[float | None]]
WRITE_SECONDS = 10.0
BUSY_SHARE = 20
"""A file that takes a second to write is replaced every twenty seconds at most."""


class TableFile:
    """A file that always is whole: a new one is written beside it and takes its place.

    Numbers of one step come at different moments (the script's own, a worker that was late), and a column may come
    late: so rows are never appended.
    """

    def __init__(self, path: str, save: Callable[[str, Columns], None]) -> None:
        self.path = os.path.abspath(path)
        self._save = save
        self._table = Table()
        self._due = time.monotonic() + WRITE_SECONDS
        self._replace()  # what cannot work should fail now

    def write(self, rows: Sequence[Scalars]) -> None:
        self._table.extend(rows)  # twice the same is harmless
        if rows and time.monotonic() >= self._due:
            self._replace()

    def event(self, event: Event) -> None:
        """A table of steps has no place for events."""

    def close(self, status: str) -> None:
        self._replace()

    def _replace(self) -> None:
        began = time.monotonic()
        passing = f"{self.path}.{os.getpid()}"
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._save(passing, self._table.columns())
            os.replace(passing, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(passing)
            raise UserError(
                f"Cannot write {self.path}.", why=error.strerror or str(error), hint="check the folder and the disk"
            ) from error
        now = time.monotonic()
        self._due = now + max(WRITE_SECONDS, BUSY_SHARE * (now - began))
