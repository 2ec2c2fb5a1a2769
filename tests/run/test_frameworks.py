"""Scripts of other frameworks run as they are, under every engine: workers find each other and train together."""

import importlib.util
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from launching import Box, box

__all__ = ["box"]

OTHER_PYTHON = os.environ.get("SHOAL_TEST_FRAMEWORKS_PYTHON", "")
"""An interpreter with JAX and TensorFlow: at 2 GB they are no part of the environment of all tests."""
FRAMEWORKS = {
    "torch": (),
    # What `accelerate launch --cpu` sets: without it, and without a GPU, every worker would train alone.
    "accelerate": ("--env", "ACCELERATE_USE_CPU=1"),
    "transformers": ("--env", "ACCELERATE_USE_CPU=1"),
    "lightning": (),
    "jax": ("--framework", "jax", "--python", OTHER_PYTHON),
    "tensorflow": ("--framework", "tensorflow", "--python", OTHER_PYTHON),
}
ENGINES = {
    "local": (),
    "mpi": ("--engine", "mpi"),
    "ray": ("--engine", "ray", "--address", "local"),
    "spark": ("--engine", "spark"),
}
QUICK = [
    *((framework, "local") for framework in ("torch", "accelerate", "transformers", "lightning")),
    ("torch", "mpi"),
]
REST = [pair for pair in itertools.product(FRAMEWORKS, ENGINES) if pair not in QUICK]


@pytest.mark.parametrize(("framework", "engine"), QUICK)
def test_two_workers_train_together(box: Box, framework: str, engine: str) -> None:
    train_together(box, framework, engine, 110)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "engine"), REST)
def test_two_workers_train_together_under_any_engine(box: Box, framework: str, engine: str) -> None:
    train_together(box, framework, engine, 300)


def train_together(box: Box, framework: str, engine: str, timeout: float) -> None:
    """Each of two workers has half of the samples and begins with weights of its own; they end with the same ones."""
    skip_without(framework, engine)
    script = str(Path(__file__).with_name(f"framework_{framework}.py"))
    done = box.run("run", "-n", "2", *ENGINES[engine], *FRAMEWORKS[framework], script, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = last_lines(box, 2)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["world"] == second["world"] == 2
    assert first["samples"] == second["samples"] == 16
    assert first["weights"] == second["weights"]
    assert any(first["weights"])


@pytest.mark.slow
def test_tensorflow_trains_with_a_parameter_server(box: Box) -> None:
    skip_without("tensorflow", "local")
    script = str(Path(__file__).with_name("framework_tensorflow_servers.py"))
    done = box.run("run", "-n", "4", *FRAMEWORKS["tensorflow"], script, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    chief, *others = last_lines(box, 4)
    assert [chief["role"], *(other["role"] for other in others)] == ["chief", "ps", "worker", "worker"]
    assert chief["device"].startswith("/job:ps/")
    assert chief["weights"] == pytest.approx([1.0, 2.0], abs=0.01)


def last_lines(box: Box, num_workers: int) -> list[dict[str, Any]]:
    """What each worker said of itself, at its end."""
    said = [[line for line in box.log(rank).splitlines() if line.startswith('{"')] for rank in range(num_workers)]
    return [json.loads(lines[-1]) for lines in said]


def skip_without(framework: str, engine: str) -> None:
    """Skip the test, and say why, where this machine lacks something."""
    packages, tools = {
        "local": ((), ()),
        "mpi": ((), ("mpirun",)),
        "ray": (("ray", "shoal.engine.ray"), ()),
        "spark": (("pyspark", "shoal.engine.spark"), ("java",)),
    }[engine]
    if framework not in ("jax", "tensorflow"):
        packages = (framework, *packages)
    elif not OTHER_PYTHON:
        pytest.skip(
            "SHOAL_TEST_FRAMEWORKS_PYTHON is not set: `python3 -m venv other && other/bin/pip install jax==0.10.2 "
            "tensorflow-cpu==2.21.0`, and set it to the path of other/bin/python"
        )
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    lacking += [name for name in tools if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"{framework} under the engine {engine} needs {', '.join(lacking)}")
