"""Which attempts can be forked from the warm process: those whose libraries would have found the same."""

import pytest

from shoal.engine.seeds import is_alike
from shoal.service.orders import Orders
from shoal.service.warming import Setup, setup_of, threads_of


def orders(*argv: str, **more: object) -> Orders:
    usual = {"job": "1", "token": 1, "argv": (*argv, "train.py"), "cwd": "/", "run_name": "job-1"}
    return Orders(**{**usual, **more})  # type: ignore[arg-type]


def test_only_what_the_run_says_of_itself_may_differ() -> None:
    loaded = {"OMP_NUM_THREADS": "1", "HOME": "/h", "SHOAL_ATTEMPT": "----"}
    run = {"RANK": "1", "MASTER_PORT": "4000", "SHOAL_ATTEMPT": "/a/1", "TORCHELASTIC_RUN_ID": "job-1"}
    assert is_alike(loaded, {**loaded, **run})
    for name in ("OMP_NUM_THREADS", "HOME", "LD_PRELOAD", "PYTHONHASHSEED", "LR"):
        assert not is_alike(loaded, {**loaded, **run, name: "2"})
    assert not is_alike(loaded, {**run, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    "asked",
    [
        orders("--env", "LR=1"),
        orders("--env=LR=1"),
        orders("--python", "/usr/bin/python3"),
        orders("--engine", "ray"),
        orders("--framework", "jax"),
        *(orders(env={name: "1"}) for name in ("PYTHONPATH", "LD_PRELOAD", "HOME")),
    ],
)
def test_what_is_special_is_started_plainly(asked: Orders) -> None:
    assert setup_of(asked, 8, is_held=True) is None


def test_a_setup_is_its_threads_and_its_variables() -> None:
    def found(asked: Orders) -> Setup | None:
        return setup_of(asked, 8, is_held=True)

    assert found(orders("-m", env={"SHOAL_JOB": "1", "SHOAL_ARRAY_INDEX": "0"})) == found(orders()) == Setup(8, {})
    assert found(orders(env={"OMP_NUM_THREADS": "5", "LR": "1"})) == Setup(8, {"OMP_NUM_THREADS": "5", "LR": "1"})
    both = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    assert (
        found(orders("--threads", "2"))
        == found(orders("--threads=2", env={"OMP_NUM_THREADS": "5"}))
        == Setup(2, both)
    )


@pytest.mark.parametrize(
    ("num_workers", "cores", "is_held", "threads"),
    [
        (1, 0.0, True, 8),
        (2, 0.0, True, 4),
        (1, 1.0, True, 1),
        (2, 2.5, True, 2),
        (1, 1.0, False, 8),
        (16, 1.0, True, 1),
    ],
)
def test_threads_are_those_that_the_launcher_will_count(
    num_workers: int, cores: float, is_held: bool, threads: int
) -> None:
    assert threads_of(orders(num_workers=num_workers, cores=cores), 8, is_held=is_held) == threads
