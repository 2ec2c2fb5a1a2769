"""Every example runs as its first lines say, ends well, and says what it promises."""

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.testing import rigs
from shoal.testing.rigs.mpi import mpirun
from tests.run.launching import SHOAL, Box

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}

PYTHON = (sys.executable,)
TWO = (*SHOAL, "run", "-n", "2")
COMMANDS = {
    "01_one_file": PYTHON,
    "02_own_loop": TWO,
    "03_weighted_loss": PYTHON,
    "04_exact": TWO,
    "05_resume": PYTHON,
    "06_transfer": PYTHON,
    "07_launch": PYTHON,
    "08_plain_ddp": TWO,
    "09_everyday": TWO,
    "10_files": PYTHON,
    "11_faults": PYTHON,
    "12_map": PYTHON,
    "13_matrix_multiplication": TWO,
    "14_constrained_optimisation": TWO,
    "15_local": TWO,
    "16_tensor": (*TWO, "-o", "split=tensor:2"),
    "17_pipeline": (*TWO, "-o", "split=pipeline:2"),
    "18_mpi_matrix": (*mpirun(4), *PYTHON),
    "19_numbers": PYTHON,
}
"""How each is run here. Starting torch takes most of the time, so most run in one process."""

Finish = Callable[[str], str]


def execute(box: Box, *command: str, code: int = 0) -> str:
    """What a command printed; its exit code must be `code`."""
    done = box.execute(*command, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finish]:
    """Waits for an example and gives its output. They run two at a time, while the tests look at those before."""
    box = Box(tmp_path_factory.mktemp("examples"))
    # One thread each, because several of them share the cores here.
    box.env["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(2) as pool:
        runs: dict[str, Future[str]] = {
            name: pool.submit(execute, box, *command, str(EXAMPLES[name])) for name, command in COMMANDS.items()
        }
        runs["exact_alone"] = pool.submit(execute, box, *PYTHON, str(EXAMPLES["04_exact"]))
        runs["resumed"] = pool.submit(fail_and_resume, box)
        yield lambda name: runs[name].result()
    assert not box.pids(), "processes stayed behind"


def fail_and_resume(box: Box) -> str:
    """The two commands at the top of the example: two workers fail, one goes on."""
    script = str(EXAMPLES["05_resume"])
    execute(box, *TWO, "--name", "first", script, "--fail-at", "25", code=1)
    return execute(box, *SHOAL, "run", "-n", "1", "--resume", "first", script)


def digest_in(output: str) -> str:
    found = re.search(r"digest of the parameters: (\w{12})", output)
    assert found, output
    return found[1]


def test_all_examples_are_run_here():
    assert list(EXAMPLES) == list(COMMANDS)


PROMISES = {
    "01_one_file": r"loss after 3 epochs: 0\.0\d",
    "02_own_loop": r"\[0-1\] good enough after \d+ epochs",
    "03_weighted_loss": r"after 2 epochs: 0\.0\d+ per token",
    "06_transfer": r"from nothing: [56]\d %(.|\n)*from the first run: [78]\d %",
    "07_launch": r"hello from rank 2 of 3(.|\n)*\(0, '(\w+)'\), \(1, '\2'\)",
    "08_plain_ddp": r"\[1\] rank 1, epoch 2: loss 0\.\d",
    "09_everyday": r"averaged weights: +9\d\.\d % right",
    "10_files": r"rent .*: 0\.1\d, 0\.[45]\d, 0\.[12]\d",
    "12_map": r"each once: True\nthe hundredth prime is below 542\nItem 13: ValueError: unlucky",
    "13_matrix_multiplication": r"720 x 720 in 2 blocks of 720 x 360: largest difference to one process \d\.\de",
    "14_constrained_optimisation": r"2 workers, \d+ rounds(.|\n)*KKT residual \d\.\de-(08|09|1\d), sum 1\.000000",
    "15_local": r"local:10,outer=nesterov,codec=int8: (8[5-9]|9\d)\.\d % right",
    "11_faults": r"kill of rank 1(.|\n)*in peace: +(\w+), exit code 0\nwith faults: \2, exit code 0",
    "16_tensor": r"this worker holds 55,520 parameters(.|\n)*loss after 2 epochs: 0\.10\d+",
    "17_pipeline": r"digest of the parameters: (\w{12})(.|\n)*digest of the parameters: \1",
    "19_numbers": r"finished \(120, 4\)(.|\n)*a notebook shows 1 plot(.|\n)*120 rows; the last error is 0\.0",
    "18_mpi_matrix": r"by 4 ranks in \d+\.\d+ s: largest difference to numpy (0\.0e\+00|\d\.\de-1\d)",
}
"""What the output must match. Digests of 04 and 05 are compared below."""


NEEDS = {"18_mpi_matrix": rigs.needs("mpirun", "mpi4py")}
"""What an example needs that not every machine has."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in PROMISES])
def test_an_example_says_what_it_promises(name, finish):
    assert re.search(PROMISES[name], finish(name)), finish(name)


def test_one_process_and_two_workers_give_the_same_digest(finish):
    assert digest_in(finish("04_exact")) == digest_in(finish("exact_alone"))


def test_one_worker_goes_on_where_two_failed_and_arrives_at_the_same_digest(finish):
    resumed = finish("resumed")
    assert "starting at step 20" in resumed
    assert digest_in(resumed) == digest_in(finish("05_resume"))


def test_the_lines_in_the_readme_are_those_of_the_first_example():
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown, "README.md shows no Python"
    assert shown[1].strip() in EXAMPLES["01_one_file"].read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_the_commands_that_start_it(name):
    assert f"examples/{name}.py" in EXAMPLES[name].read_text().partition('"""\n\n')[0]
