"""A rank that hangs is named, with the line of the user's code it is in: in its data, or because it skips a step.

All runs go on at the same time, since all of them wait for ten seconds first.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import IN_TIME, Box, box

from shoal.observe import journal
from shoal.spec.event import Event

__all__ = ["box"]

JOB = Path(__file__).parent / "hanging_job.py"


def line_of(words: str) -> str:
    number = next(n for n, line in enumerate(JOB.read_text().splitlines(), start=1) if f"# {words}" in line)
    return f"hanging_job.py:{number}"


@dataclass(frozen=True)
class Run:
    folder: Path
    launcher: subprocess.Popen[str]
    told: Path

    def events(self, kind: str) -> list[Event]:
        return [event for event in journal.read(str(self.folder / "journal.jsonl")) if event.kind == kind]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Box, dict[tuple[str, str], Run]]]:
    box = Box(tmp_path_factory.mktemp("hanging"))
    (box.folder / JOB.name).write_text(JOB.read_text())
    found = {}
    for size in ("2", "1:2"):
        for how in ("data", "skip"):
            name, told = f"{how}-{size[0]}", box.folder / f"{how}-{size[0]}.txt"
            with told.open("w") as file:
                more = ("-o", "engine.spares=0", "--name", name)
                launcher = box.start("run", "-n", size, *more, JOB.name, how, stdout=file, stderr=file)
            found[size, how] = Run(box.home / "runs" / name, launcher, told)
    yield box, found
    for run in found.values():
        run.launcher.kill()
        run.launcher.wait()
    box.wait_for_peace()


@pytest.mark.parametrize("how", ["data", "skip"])
@pytest.mark.parametrize("size", ["2", "1:2"])
def test_who_hangs_is_named_with_its_place(runs: tuple[Box, dict[tuple[str, str], Run]], size: str, how: str) -> None:
    box, found = runs
    run = found[size, how]
    (event,) = box.wait_for(lambda: run.events("worker_hung"), 50)
    assert event.rank == 1
    assert event.data["where"] == line_of(f"stuck in {how}")
    assert 10.0 <= event.data["waited_seconds"] < 50.0
    function = "__getitem__" if how == "data" else "elsewhere"
    assert event.data["stack"][0] == f"{line_of(f'stuck in {how}')} in {function}"
    box.wait_for(lambda: "stacks of all ranks" in run.told.read_text())
    told = run.told.read_text()
    assert re.search(r"shoal: rank 1 hangs: .* waited \d\d\.\d s for it", told)
    assert f"  rank 1 is in {line_of(f'stuck in {how}')} in {function}" in told
    for rank in (0, 1):
        text = (run.folder / "stacks" / f"{rank}.txt").read_text()
        assert text.startswith("=== ")
        assert "in <module>" in text
    assert "comm/" in (run.folder / "stacks" / "0.txt").read_text(), "rank 0 waits in a group"


def test_an_elastic_run_replaces_it(runs: tuple[Box, dict[tuple[str, str], Run]]) -> None:
    _, found = runs
    run = found["1:2", "data"]
    assert run.launcher.wait(50) == 0
    assert {event.rank for event in run.events("worker_lost")} == {1}
    assert "digest" in run.told.read_text()


def test_who_is_in_code_of_its_own_is_named_and_not_killed_at_once(
    runs: tuple[Box, dict[tuple[str, str], Run]],
) -> None:
    box, found = runs
    run = found["1:2", "skip"]
    (event,) = box.wait_for(lambda: run.events("worker_hung"), 50)
    assert not event.data["is_ended"]
    assert "it is in code of your own" in run.told.read_text()
    assert not run.events("worker_lost")


def test_a_run_of_fixed_size_goes_on_waiting(runs: tuple[Box, dict[tuple[str, str], Run]]) -> None:
    box, found = runs
    run = found["2", "data"]
    box.wait_for(lambda: run.events("worker_hung"), 50)
    assert run.launcher.poll() is None
    done = box.run("stacks", run.folder.name, "--json")
    answer = {stack["rank"]: stack for stack in json.loads(done.stdout)["stacks"]}
    assert answer[1]["where"] == line_of("stuck in data")
    assert len(answer[0]["processes"][0]) > 1, "all threads are there"


def test_who_comes_after_all_is_told(box: Box) -> None:
    """Workers of any kind may say that they wait."""
    box.write(
        "toy.py",
        """
        import json, os, time
        rank, fd = int(os.environ["RANK"]), int(os.environ["SHOAL_CONTROL_FD"])
        def say(kind, step=None, **data):
            line = json.dumps({"kind": kind, "time": time.time(), "step": step, "data": data})
            os.write(fd, line.encode() + b"\\n")
        def wait_for(name):
            while not os.path.exists(name):
                time.sleep(0.01)
        def wait_for_disk():
            open("up", "w").close()
            wait_for("disk")
        for step in range(8):
            say("progress", step)
            time.sleep(0.02)
        if rank == 1:
            wait_for_disk()
        wait_for("up")
        while rank == 0 and not os.path.exists("disk"):
            say("waiting", members=["1.0"], seconds=12.0, generation=-1)
            time.sleep(0.2)
        wait_for("end")
        """,
    )
    with (box.folder / "told").open("w") as file:
        launcher = box.start("run", "-n", "2", "--name", "toy", "toy.py", stdout=file, stderr=file)
    run = Run(box.home / "runs" / "toy", launcher, box.folder / "told")
    box.wait_for(lambda: run.events("worker_hung"))
    (box.folder / "disk").touch()
    box.wait_for(lambda: run.events("worker_went_on"))
    (box.folder / "end").touch()
    assert launcher.wait(IN_TIME) == 0
    lines = [line for line in run.told.read_text().splitlines() if line.startswith("shoal: ")]
    assert re.fullmatch(r"shoal: rank 1 hangs: rank 0 waited 12\.\d s for it", lines[0])
    assert re.match(
        r"shoal:   rank 1 is in toy\.py:\d+ in wait_for, called from toy\.py:\d+ in wait_for_disk", lines[1]
    )
    assert re.fullmatch(r"shoal: rank 1 went on after \d\d s", lines[3])
    assert len(run.events("worker_went_on")) == 1


PLAIN = """
    import os, time
    import torch.distributed as dist
    dist.init_process_group("gloo")
    open("up" + os.environ["RANK"], "w").close()
    def reduce():
        dist.barrier()
    if os.environ["RANK"] == "1":
        while True:
            pass
    reduce()
"""


def test_any_script_can_be_asked(box: Box) -> None:
    box.write("plain.py", PLAIN)
    launcher = box.start("run", "-n", "2", "--name", "p", "plain.py")
    try:
        box.wait_for_files("up0", "up1")
        is_waiting = re.compile(r"^rank 0 is in .*called from plain.py:7 in reduce")
        box.wait_for(lambda: is_waiting.search(box.run("stacks", "p").stdout))
        done = box.run("stacks", "p")
        assert done.returncode == 0, done.stderr
        first, second, *_ = done.stdout.splitlines()
        assert is_waiting.search(first)
        assert re.match(r"rank 1 is in plain\.py:\d+ in <module>", second)
        wrong = box.run("stacks", "p", "--rank", "7")
        assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (2, "error: There is no rank 7 that runs.")
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=IN_TIME)


def test_programs_that_are_not_python_are_left_alone(box: Box) -> None:
    box.write("work.sh", '#!/bin/sh\ntouch "up$RANK"\nwhile [ ! -e go ]; do sleep 0.05; done\n').chmod(0o755)
    launcher = box.start("run", "-n", "2", "--name", "s", "./work.sh")
    box.wait_for_files("up0", "up1")
    done = box.run("stacks", "s")
    assert "rank 1: the process does not run Python, or has hardly begun" in done.stdout
    (box.folder / "go").touch()
    assert launcher.wait(IN_TIME) == 0
    launcher.communicate()
    assert os.listdir(box.home / "runs" / "s" / "stacks")
