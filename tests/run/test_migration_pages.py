"""What the pages for those who come from elsewhere say a program becomes, is run as it stands there."""

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import SHOAL, Box, box, small_cluster

from shoal.testing import rigs

__all__ = ["box"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DOCS = Path(__file__).parents[2] / "docs"
SECONDS = 800.0


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def after(diff: str) -> str:
    """What a diff comes to."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def commands(page: str) -> Iterator[list[str]]:
    """The commands that stand alone in indented lines."""
    for line in re.findall(r"^    (shoal run .*)$", (DOCS / page).read_text(), re.MULTILINE):
        yield shlex.split(line)


@pytest.mark.parametrize("page", ["from-ray-train.md", "from-torchdistributor.md"])
@pytest.mark.parametrize("sign", ["+", "-"])
def test_both_sides_of_each_diff_are_programs(page: str, sign: str) -> None:
    for diff in blocks(page, "diff"):
        other = "-" if sign == "+" else "+"
        kept = [line[1:] for line in diff.splitlines() if not line.startswith(other)]
        ast.parse("\n".join(kept))


@rigs.needs("ray")
def test_from_ray_train(box: Box) -> None:
    from shoal.testing.rigs.rays import ray_cluster

    page = "from-ray-train.md"
    (diff,) = blocks(page, "diff")
    (of_ray_data,) = blocks(page, "python")
    box.write("train.py", after(diff))
    box.write("rows.py", of_ray_data.replace("/shared/rows", str(box.folder / "rows")))
    ours, plain = commands(page)
    with ray_cluster(3) as cluster:
        box.env |= {**cluster.env, "RAY_ADDRESS": cluster.address}
        for command in (ours, plain):
            assert command[0] == "shoal"
            words = [word.replace("HOST:6379", cluster.address) for word in command[1:]]
            words = [str(DOCS.parent / word) if word.startswith("examples/") else word for word in words]
            done = box.execute(*SHOAL, *words, timeout=SECONDS)
            assert done.returncode == 0, done.stderr
            if command is ours:
                error = re.search(r"{'loss': ([\d.e-]+)}", done.stdout)
                assert error, done.stdout
                assert float(error[1]) < 0.002
                assert (box.home / "runs" / "sine").is_dir()
        done = box.execute(sys.executable, "rows.py", timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        assert "[40, 40]" in done.stdout


SESSION = """
    import random, sys
    from pyspark.sql import SparkSession
    builder = SparkSession.builder.master("MASTER").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.driver.host", "127.0.0.1")
    session = builder.config("spark.sql.warehouse.dir", "tables").getOrCreate()
    session.range(0, 24_000, 1, 4).selectExpr(
        "cast(id % 11 as double) / 10 as size", "cast(id % 5 as int) as rooms", "cast(id % 3 as int) as floor"
    ).selectExpr("*", "0.5 * size + 0.2 * rooms - 0.1 * floor + 0.1 as rent").createOrReplaceTempView("rents")

"""


@rigs.needs("pyspark", "java")
@pytest.mark.parametrize("engine", ["local", "spark"])
def test_from_torchdistributor(box: Box, engine: str) -> None:
    whole, one_line = map(after, blocks("from-torchdistributor.md", "diff"))
    lines = whole.rstrip("\n").splitlines()
    assert lines[-1].startswith("weights, *_ = shoal.launch(")
    if engine == "spark":
        lines[-1] = one_line.strip()
        assert 'engine="spark"' in lines[-1]
    program = "\n".join(lines).replace("/shared/rents", str(box.folder / "rents"))
    master = "local[2]" if engine == "local" else "local-cluster[2,2,1024]"
    box.write("train.py", SESSION.replace("MASTER", master))
    with (box.folder / "train.py").open("a") as file:
        file.write(program + "\nprint('weights', *weights['weight'][0], *weights['bias'])\nspark.stop()\n")
    small_cluster(box)
    box.env |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_DIRS": str(box.folder / "scratch")}
    done = box.execute(sys.executable, "train.py", timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^weights (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert [float(number) for number in found[1].split()] == pytest.approx([0.5, 0.2, -0.1, 0.1], abs=0.05)
