"""Failures of the user's data code, told in the user's terms: which sample, which line, which shapes."""

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.spec.errors import UserError
from shoal.spec.where import users_place_of


def blame(error: Exception, message: str, *, why: str = "", hint: str = "") -> UserError:
    """An error that says what the user's code did and where, and keeps the whole story in `remote_traceback`."""
    return UserError(
        message,
        why=why or f"{type(error).__name__}: {error}",
        hint=hint,
        where=users_place_of(error),
        remote_traceback="".join(traceback.format_exception(error)),
    )


def collate_failed(error: Exception, samples: Sequence[Any], ids: Sequence[int]) -> UserError:
    """Explain why samples could not be put together, by the first two that differ where there are such."""
    difference = _first_difference(samples)
    if difference is None:
        return blame(
            error,
            f"Samples {ids[0]} to {ids[-1]} could not be collated into a batch.",
            hint="return tensors, arrays or numbers from the dataset, or a function for the rest: `collate=`",
        )
    number, part, here, there = difference
    return blame(
        error,
        f"Samples {ids[0]} and {ids[number]} cannot go into one batch: {part} is {here} in the first and {there} in "
        "the second.",
        why="the samples of a batch are stacked, so they need equal shapes and types",
        hint="pad or crop them in the dataset, or pass `collate=` a function that can put them together",
    )


def _first_difference(samples: Sequence[Any]) -> tuple[int, str, str, str] | None:
    first = _describe(samples[0], "the sample")
    for number, sample in enumerate(samples):
        other = _describe(sample, "the sample")
        for part in [*first, *other]:
            here, there = first.get(part, "missing"), other.get(part, "missing")
            if here != there:
                return number, part, here, there
    return None


def _describe(value: Any, name: str) -> dict[str, str]:
    """The shape or type of every part of a sample, by a name people recognise: `item['x']`, `item[0]`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {name: f"a {type(value).__name__} of shape {tuple(value.shape)}"}
    inside = "item" if name == "the sample" else name
    if isinstance(value, Mapping):
        return {k: v for key, part in value.items() for k, v in _describe(part, f"{inside}[{key!r}]").items()}
    if isinstance(value, (tuple, list)):
        return {k: v for key, part in enumerate(value) for k, v in _describe(part, f"{inside}[{key}]").items()}
    return {name: f"of type {type(value).__name__}"}
