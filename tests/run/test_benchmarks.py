"""Benchmarks run, tiny, and tell what it takes to judge their numbers.

Left out are `local`, `recovery` and `durability`: they take minutes however little they do.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import harness
from shoal.testing import rigs

FACTS = {"benchmark", "date", "command", "commit", "machine", "rows"}


def run_quickly(name: str) -> dict[str, Any]:
    """In a process of its own: some peers fork, which goes wrong where other tests have left threads."""
    command = [sys.executable, "-m", "benchmarks", name, "--json", "--quick", "--rounds", "1"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param("bookkeeping", "measured", marks=pytest.mark.slow),
        ("commands", "cpu ms"),
        pytest.param("data_parallel", "ms a step", marks=pytest.mark.slow),
        pytest.param("elastic_cost", "cost", marks=pytest.mark.slow),
        pytest.param(
            "engines", "first step s", marks=[pytest.mark.slow, pytest.mark.timeout(900), rigs.needs("ray")]
        ),
        pytest.param("exact", "cost", marks=pytest.mark.slow),
        pytest.param("eyes", "ms a step", marks=pytest.mark.slow),
        pytest.param("launch", "first step s", marks=pytest.mark.slow),
        pytest.param("page", "seconds", marks=[pytest.mark.slow, rigs.needs("chromium", "playwright", "the page")]),
        pytest.param("pipeline", "ms a step", marks=pytest.mark.slow),
        pytest.param("spark_data", "first step s", marks=pytest.mark.slow),
        pytest.param("save_stall", "stall, ms", marks=pytest.mark.slow),
        ("task_map", "sleep s"),
        pytest.param("tensor", "ms a step", marks=pytest.mark.slow),
        pytest.param("top", "% of a core", marks=pytest.mark.slow),
        pytest.param("uneven", "before", marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_runs(name: str, column: str) -> None:
    result = run_quickly(name)
    assert {*FACTS, "checks", "samples_seconds"} <= set(result)
    assert {"median", "low", "high", "rounds"} <= set(result["rows"][0][column])
    for goal in result["checks"]:
        assert set(goal) == {"goal of", "measured", "goal", "verdict"}
        assert goal["verdict"] in ("met", "missed")
    assert column in harness.render(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("allreduce", "shoal"),
        ("sharded", "ms a step"),
        pytest.param("mpi_transport", "mpi", marks=rigs.needs("mpirun", "mpi4py")),
    ],
)
def test_a_benchmark_without_goals_when_tiny_runs(name: str, column: str) -> None:
    result = run_quickly(name)
    assert set(result) >= FACTS
    assert {"median", "low", "high", "rounds"} <= set(result["rows"][0][column])
    assert column in harness.render(result)


def test_all_benchmarks_of_the_package_are_known() -> None:
    known = {
        "allreduce",
        "bookkeeping",
        "commands",
        "data_parallel",
        "durability",
        "exact",
        "launch",
        "local",
        "recovery",
    }
    assert known <= set(command.names())


@pytest.mark.parametrize(
    ("goal", "value", "verdict"),
    [("≥ 0.95", 0.95, "met"), ("≥ 0.95", 0.9, "missed"), ("≤ 150", 149.0, "met"), ("≤ 150", 151.0, "missed")],
)
def test_a_goal_is_met_or_missed(goal: str, value: float, verdict: str) -> None:
    assert harness.check("it", harness.summarize([value]), goal)["verdict"] == verdict
