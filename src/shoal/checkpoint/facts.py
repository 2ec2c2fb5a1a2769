"""Facts as JSON and back, without loss.

JSON has no infinity, no tuple and no key that is a number, yet the state of PyTorch's own schedulers holds all three
(`ReduceLROnPlateau` starts at infinity, `MultiStepLR` counts by integer keys). Such values travel as an object with
one key that starts with `$`; everything else is plain JSON that people can read.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shoal.spec.errors import UserError

MAX_DEPTH = 64  # far more than anyone nests, far less than what reading it back can recurse
Fact = Any
"""None, bool, int, float, str, and lists, tuples and mappings (keys: str or int) of facts."""


def encode(facts: Mapping[str, Fact]) -> bytes:
    """Facts as the bytes of a JSON object: a copy, untouched by later changes. UserError for what cannot be kept."""
    return msgspec.json.encode(pack(dict(facts)))


def decode(data: bytes) -> dict[str, Fact]:
    """The inverse of `encode`; raises ValueError for what `encode` cannot have written."""
    try:
        facts = unpack(msgspec.json.decode(data))
    except (RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(facts, dict):
        raise ValueError("they are not a mapping")
    return facts


def pack(value: Fact, where: str = "facts", depth: int = 0) -> Any:
    """Turn a fact into plain JSON values. What cannot be kept is a UserError that names its place."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if depth == MAX_DEPTH:
        raise _cannot_keep(where, f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list | tuple):
        items = [pack(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, where, depth)
    raise _cannot_keep(where, f"is a {type(value).__name__}")


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _cannot_keep(where, "is text that is not valid Unicode") from None
    return value


def _pack_mapping(value: Mapping[Any, Fact], where: str, depth: int) -> dict[str, Any]:
    items = [(key, pack(item, f"{where}[{key!r}]", depth + 1)) for key, item in value.items()]
    for key, _ in items:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise _cannot_keep(where, f"has the key {key!r}, which is neither text nor an integer")
        _text(str(key), where)
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
        return dict(items)
    return {"$pairs": [[key, item] for key, item in items]}


def _cannot_keep(where: str, what: str) -> UserError:
    return UserError(
        f"The checkpoint cannot keep {where}: it {what}.",
        why="facts are plain values: numbers, text, booleans, None, and lists, tuples and dicts of them",
        hint="turn it into plain values (`int(x)`, `x.tolist()`), or put tensors into the state's tensors",
    )


def unpack(value: Any) -> Fact:
    """The inverse of `pack`. Raises ValueError for a `$` key it does not know."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, content), *_ = value.items()
        if key.startswith("$"):
            return _unpack_tagged(key, content)
    return {key: unpack(item) for key, item in value.items()}


def _unpack_tagged(tag: str, content: Any) -> Fact:
    if tag not in _UNPACK:
        raise ValueError(f"unknown kind of fact {tag!r}")
    try:
        return _UNPACK[tag](content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a fact marked {tag!r} has the wrong content") from error


_UNPACK: dict[str, Callable[[Any], Fact]] = {
    "$float": float,
    "$tuple": lambda items: tuple(unpack(item) for item in items),
    "$pairs": lambda pairs: {key: unpack(item) for key, item in pairs},
}
