"""Whose code an error points at."""

import functools
import os
from dataclasses import dataclass

import pytest

from shoal.spec.where import is_users, place_of, place_of_function, users_place_of

HERE = os.path.relpath(__file__)


@dataclass
class Checked:
    value: int

    def __post_init__(self) -> None:
        int("no number")


def test_code_that_a_library_made_is_not_the_users() -> None:
    """The `__init__` of a dataclass is in a file called <string>."""
    assert not is_users("<string>")
    assert not is_users(os.__file__)
    assert not is_users("")
    assert is_users(__file__)
    assert is_users("<stdin>")
    with pytest.raises(ValueError) as caught:
        Checked(1)
    assert place_of(caught.value) == f"{HERE}:{Checked.__post_init__.__code__.co_firstlineno + 1}"


def test_an_error_points_at_the_innermost_line_of_the_user() -> None:
    def fail() -> None:
        functools.reduce(lambda a, b: os.stat(f"/nowhere/{a}/{b}"), "ab")  # type: ignore[arg-type,return-value]

    with pytest.raises(OSError) as caught:
        fail()
    line = fail.__code__.co_firstlineno + 1
    assert place_of(caught.value) == users_place_of(caught.value) == f"{HERE}:{line}"


def test_functions_are_found_through_decorators_and_partials() -> None:
    def loss(model: object, batch: object) -> None: ...

    class Loss:
        def __call__(self, model: object, batch: object) -> None: ...

    at = f"{HERE}:{loss.__code__.co_firstlineno}"
    assert place_of_function(loss) == at
    assert place_of_function(functools.partial(loss, None)) == at
    assert place_of_function(functools.lru_cache(loss)) == at
    assert place_of_function(Loss()) == f"{HERE}:{Loss.__call__.__code__.co_firstlineno}"
    assert place_of_function(os.path.join) == ""
    assert place_of_function(print) == ""
    assert place_of_function(None) == ""
