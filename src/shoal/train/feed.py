"""The batches of a call of `fit` or of a loop, which begin anew when the World changes."""

from collections.abc import Callable, Iterator
from typing import Self

from shoal.data.loader import Loader
from shoal.data.readers import Loaded


class Feed:
    """Hands out what a loader has loaded, until `drop` makes it begin anew with the next. Closed when left."""

    def __init__(self, make: Callable[[], Loader]) -> None:
        self._make = make
        self._is_dropped = False
        self.loader = make()

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        if self._is_dropped:
            self.loader.close()
            self.loader = self._make()
            self._is_dropped = False
        return next(self.loader)

    def drop(self) -> None:
        """What was loaded ahead is of no use: it was for other shards, or for another place."""
        self._is_dropped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.close()
