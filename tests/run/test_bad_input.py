"""Every mistake is told in four parts (what, where, why, what to do), ends with an exit code, and loses nothing.

docs/errors.md has a row for each test here; `test_every_mistake_has_its_row` keeps them together.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import mistaken
import psutil
import pytest
import torch
from launching import SHOAL, Box, box
from mistakes import Mistake, fit, make, use
from mistakes_in_data import DATA, write
from mistakes_in_meshes import ALONE, MESHES, MeshMistake
from mistakes_in_models import LOSSES, MODELS
from mistakes_in_runs import FOLDERS, RESUMED, SETTINGS, resume, spoil, start_from_other_shapes
from torch import nn

import shoal
from shoal import cli
from shoal.checkpoint.store import FolderStore
from shoal.spec.errors import ShoalError, UserError
from shoal.spec.where import place_of
from shoal.train.settings import RULES, Settings

__all__ = ["box"]

MISTAKES = [*LOSSES, *MODELS, *DATA, *SETTINGS, *FOLDERS, *RESUMED, *ALONE]
SCRIPT = str(Path(mistaken.__file__))
DOCS = Path(__file__).parents[2] / "docs" / "errors.md"


def parts_of(text: str) -> dict[str, str]:
    """The parts of an error by their names; the first of each, without the prefix of a rank."""
    lines = [line.partition("] ")[2] if line.startswith("[") else line for line in text.splitlines()]
    parts: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.strip().partition(": ")
        if colon and name in ("error", "at", "why", "do", "also", "warning"):
            parts.setdefault(name, value)
    return parts


def in_shared_memory() -> set[str]:
    """Segments of torch's and of ours; others on this machine may make theirs meanwhile, and other tests rigs."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith(("torch", "shoal"))]
    return {name for name in names if not name.startswith("shoal-rig-")}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No mistake leaves a process, a thread of ours, or a segment of shared memory."""
    before = in_shared_memory()
    children = set(psutil.Process().children())  # other tests may have a server of processes waiting
    yield
    assert in_shared_memory() <= before
    new = set(psutil.Process().children()) - children
    assert [child for child in new if child.status() != psutil.STATUS_ZOMBIE] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("shoal")] == []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs_of(*folders: Path) -> list[Path]:
    return [path.parent for folder in folders for path in folder.rglob("run.json")]


def assert_told(error: ShoalError, *, first_line: str, do: str, step: int | None) -> None:
    assert error.message == first_line
    assert (error.rank, error.step) == (0, step)
    assert error.why
    assert do in error.hint
    assert error.exit_code != 0
    names = [line.split(": ")[0].strip() for line in error.at(where=place_of(error)).render().splitlines()]
    assert names == ["error", "at", "why", "do"]
    file, _, line = error.where.rpartition(":")
    assert os.path.basename(file).startswith("mistakes"), "it points at the user's own code"
    assert int(line) > 1


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.did)
def test_a_mistake_in_a_script(mistake: Mistake, here: Path, home: Path) -> None:
    with pytest.raises(UserError) as caught:
        mistake.act()
    first_line = mistake.error.format(here=here)
    assert_told(caught.value, first_line=first_line, do=mistake.do, step=mistake.step)
    for run in runs_of(here, home):
        assert json.loads((run / "run.json").read_text())["status"] in ("failed", "finished")


def test_every_setting_is_checked() -> None:
    """No setting takes an object; each says what it wants."""
    for name in RULES:
        with pytest.raises(UserError, match=f"{name}=.* does not work") as caught:
            Settings(**{"batch_size": 8, name: object()})
        assert caught.value.hint.startswith(f"for example: {name}=")


@pytest.mark.parametrize(
    ("option", "error", "do"),
    [
        ("max_nrom=1", "There is no setting 'max_nrom' to override with -o.", "did you mean 'max_norm'?"),
        ("nothing=1", "There is no setting 'nothing' to override with -o.", "there are: batch_size, "),
        ("batch_size=abc", "batch_size='abc' does not work.", "for example: batch_size="),
    ],
)
def test_options_on_the_command_line(
    option: str, error: str, do: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = option.partition("=")
    monkeypatch.setenv("SHOAL_OPTIONS", json.dumps({name: value}))
    with pytest.raises(UserError) as caught:
        fit()
    assert_told(caught.value, first_line=error, do=do, step=None)


# Before anything starts.

COMMANDS = {
    "nothing.py": "There is no script 'nothing.py'.",
    "folder": "'folder' is a folder, not a script.",
    "wrong.py": "SyntaxError: '(' was never closed",
    "-n 0 good.py": "-n is 0.",
    "-n abc good.py": "-n 'abc' is not a number.",
    "-n 4:2 good.py": "-n 4:2 asks for at least 4 workers and at most 2.",
    "-n 2:many good.py": "-n '2:many' is not a range.",
    "-n 100000 good.py": "100000 workers do not fit into memory.",
    "--log-dir /proc/nowhere good.py": "Cannot use /proc/nowhere as a run folder.",
    "--nun-workers 2 good.py": "There is no option '--nun-workers'.",
    "-n 2 -o max_nrom=1 good.py": "There is no setting 'max_nrom' to override with -o.",
    "-n 2 -o batch_size=abc good.py": "batch_size='abc' does not work.",
    "-n 2 -o sync=loca:32 good.py": "There is no sync 'loca'.",
    "-n 2 -o sync=local:often good.py": "This local does not work.",
    "-n 2 -o sync=local:8 -o exact=true good.py": "exact=True and sync=local:8 exclude each other.",
    "-n auto -o split=tensor:0 good.py": "This tensor does not work.",
    "-n 2 -o train.split=ring:2 good.py": "There is no split 'ring'.",
    "-n 3 -o split=tensor:2+pipeline:2 good.py": "3 workers cannot hold copies of 4 parts each.",
    "-n 2:3 -o split=pipeline:4 good.py": "3 workers cannot hold copies of 4 parts each.",
    "-n 4 -o split=pipeline:2,microbatches=8 -o batch_size=12 good.py": "6 samples of each copy are too few for 8 "
    "micro-batches.",
    "": "No script was named.",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_on_the_command_line(
    command: str, here: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("good.py", "print('ran')")
    write("wrong.py", "x = 1\ny = (\n")
    (here / "folder").mkdir()
    assert cli.main(["run", *command.split()]) == 2
    told = parts_of(capsys.readouterr().err)
    assert told["error"] == COMMANDS[command]
    assert told["do"]
    assert runs_of(here, home) == []
    if command == "wrong.py":
        assert told["at"] == "wrong.py:2"


def test_missing_extras_name_the_command(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write("table.csv", "a,b\n1,2\n")
    with pytest.raises(UserError, match="needs pyarrow, which is not installed") as caught:
        fit(data="table.csv")
    assert caught.value.hint == "run `pip install 'shoal[features]'`"


# Checkpoints and weights.


def test_a_refused_resume_leaves_the_checkpoints_as_they_were(here: Path) -> None:
    with pytest.raises(UserError, match="seed was 0 and is now 3"):
        resume(seed=3)
    with FolderStore(here / "kept/checkpoints") as store:
        assert [store.verify(step).problem for step in (1, 2, 3)] == ["", "", ""]
    use(lambda trainer: trainer.fit(steps=5), run_dir="kept", resume=True)


def test_a_damaged_checkpoint_is_skipped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume(lambda checkpoints: spoil(checkpoints[-1:]))
    told = capsys.readouterr().err
    assert f"shoal: skipped the checkpoint {here}/kept/checkpoints/step-000000003: model-" in told
    assert "its bytes have changed" in told
    resumed = [event for event in events_of(here / "kept") if event["kind"] == "resumed"]
    assert [event["step"] for event in resumed] == [2]


def test_nothing_to_resume_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use(lambda trainer: trainer.fit(steps=1), run_dir="new", resume=True)
    assert f"shoal: no checkpoint in {here}/new yet; starting at step 0" in capsys.readouterr().err


def test_what_fits_is_taken_over_and_the_rest_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="The weights do not fit the model") as caught:
        start_from_other_shapes()
    assert "0.weight: the model has [8, 4] float32, the weights have [9, 4] float32" in caught.value.why
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    use(lambda trainer: None, model=model, init_from="other.pt", strict=False)
    told = capsys.readouterr().err
    assert told.startswith("1 of 4 tensors of the model were taken over\n")
    assert told.count("does not fit, kept as it was: ") == 3
    torch.testing.assert_close(model[2].bias.detach(), torch.load("other.pt")["2.bias"])


def events_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]


# Two workers.


def test_all_workers_say_the_same(tmp_path: Path) -> None:
    first, second = shoal.launch(mistaken.collect, 2, run_dir=str(tmp_path / "run"), is_quiet=True)
    for name in mistaken.COMMON:
        here, there = parts_of(first[name]), parts_of(second[name])
        assert (here.pop("at")[:6], there.pop("at")[:6]) == ("rank 0", "rank 1")
        assert here == there, name
    assert first["past nan"] == second["past nan"] == mistaken.train_past_nan()
    told = {name: parts_of(text) for name, text in first.items()}
    assert told["nan"]["error"] == "The loss is nan for samples 7, 17, 10, 16 and 1 more (rank 1, shard 5)."
    assert told["nan"]["why"].startswith("sample 17 holds nan or inf itself")
    assert parts_of(first["nan"])["at"].startswith("rank 0, step 2")
    assert told["nan over sockets"]["error"].startswith("The loss is nan for samples ")
    assert told["gradient"]["error"] == "The gradient is nan, though the loss is a number: in 2.bias."
    assert told["models"]["error"] == "The workers built different models: rank 1 differs from rank 0."
    assert told["seed"]["error"] == "The workers do not agree: seed is 0 on rank 0 and 1 on rank 1."
    assert (
        told["optimizer"]["error"] == "The workers do not agree: the optimizer is SGD on rank 0 and Adam on rank 1."
    )
    assert told["length"]["error"].endswith("the number of samples is 40 on rank 0 and 39 on rank 1.")
    assert told["cut"]["error"] == "The workers have different datasets: that of rank 1 is not that of rank 0."
    assert told["steps"]["error"] == "The workers do not agree: steps= of fit() is 3 on rank 0 and 4 on rank 1."
    assert told["shards"]["error"] == "2 workers are too many for a step of 1 samples in 1 shards."


def test_a_batch_that_the_model_cannot_take(box: Box) -> None:
    done = box.run("run", "-n", "2", SCRIPT, "get_a_wrong_batch")
    assert done.returncode == 1
    told = parts_of(done.stderr)
    assert told["error"] == "RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x3 and 4x8)"
    assert told["at"].startswith("rank 1, ")
    assert "mistakes.py:" in told["at"]
    assert told["also"].startswith("rank 0 (")
    assert "Lost rank 1." in told["also"]
    shown = done.stdout
    assert "shoal: in loss(model, batch), rank 1, step 2, with a batch of (float32[5, 4], int64[5])" in shown
    assert "mistaken.py" in shown
    assert f"{Path(shoal.__file__).parent}{os.sep}" not in shown, "no frame of ours in between"
    assert box.facts()["status"] == "failed"
    assert_whole(box.only_run(), at_least=1)


def test_a_worker_that_is_killed(box: Box) -> None:
    done = box.run("run", "-n", "2", SCRIPT, "die")
    assert done.returncode == 137
    told = parts_of(done.stderr)
    assert told["error"] == "The worker was killed by SIGKILL."
    assert told["at"].startswith("rank 1")
    assert told["why"]
    assert told["do"]
    assert told["also"].startswith("rank 0 (")
    assert_whole(box.only_run(), at_least=3)


def test_a_sample_that_fails_in_a_loading_process(box: Box) -> None:
    done = box.run("run", "-n", "2", SCRIPT, "fail_to_load")
    assert done.returncode == 2
    told = parts_of(done.stderr)
    assert told["error"].endswith("Reading sample 17 of the dataset failed.")
    assert told["at"].startswith(("rank 0, step 2, ", "rank 1, step 2, "))
    assert "mistaken.py:" in told["at"]
    assert told["why"] == "KeyError: 'label'"
    assert told["do"] == "try `dataset[17]` by itself"


@pytest.mark.parametrize(
    "mistake",
    [MESHES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in MESHES[1:])],
    ids=lambda mistake: mistake.did,
)
def test_a_strategy_that_cannot_be(mistake: MeshMistake, box: Box) -> None:
    """Told once for all workers, before any of them has taken a step, and none is left."""
    done = box.run(*mistake.command, timeout=120)
    assert done.returncode == 2, done.stderr
    told = parts_of(done.stderr)
    assert told["error"] == mistake.error
    assert mistake.do in told["do"]
    assert told["why"]
    assert (done.stdout + done.stderr).count(mistake.error) == 1
    assert "mistakes" in told["at"], "it points at the user's own code"
    assert ", step " not in told["at"] or ", step 0, " in told["at"]
    assert all(path.stat().st_size == 0 for path in box.only_run().glob("metrics-*.jsonl"))
    assert box.facts()["status"] == "failed"
    assert box.pids() == []


def assert_whole(run: Path, at_least: int) -> None:
    with FolderStore(run / "checkpoints") as store:
        problems = {entry.step: store.verify(entry.step).problem for entry in store.list()}
    assert len(problems) >= at_least
    assert set(problems.values()) == {""}


# The machine.

needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting needs root",
)


def in_namespace(box: Box, *lines: str) -> "subprocess.CompletedProcess[str]":
    """Run lines of shell where mounts are our own. `$shoal` is the command."""
    script = "\n".join([f"shoal='{' '.join(SHOAL)}'", *lines])
    return box.execute("unshare", "-m", "sh", "-c", script)


@needs_mounts
def test_a_small_dev_shm_simply_works(box: Box) -> None:
    done = in_namespace(box, "mount -t tmpfs -o size=4k none /dev/shm", f"exec $shoal run -n 2 {SCRIPT} train")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") >= 1
    settings = next(event for event in box.events() if event["kind"] == "settings")
    assert settings["data"]["sync"]["value"] == "SharedMemorySync"


@needs_mounts
def test_a_disk_that_fills_up(box: Box) -> None:
    """Training goes on and says so at once; the run counts as failed; what was saved before is whole."""
    (box.folder / "disk").mkdir()
    done = in_namespace(
        box,
        "mount -t tmpfs -o size=1600k none disk",
        f"$shoal run --log-dir disk/run {SCRIPT} train; code=$?",
        "cp -r disk/run kept",
        "head -c 4m /dev/zero > disk/rest",
        f"$shoal run --log-dir disk/other {SCRIPT} train; echo second $?",
        "exit $code",
    )
    assert done.returncode == 2
    assert "trained" in done.stdout
    assert "warning: The checkpoint of step 6 could not be saved in " in done.stdout
    told = parts_of(done.stderr)
    assert told["error"].endswith(
        "The last checkpoint, of step 12, could not be saved: what was trained after step 4 is not on disk."
    )
    assert told["at"] == "rank 0, step 12"
    assert "(ENOSPC)" in told["why"]
    assert "free some space" in told["do"]
    assert_whole(box.folder / "kept", at_least=2)
    assert json.loads((box.folder / "kept/run.json").read_text())["status"] == "failed"
    failed = next(event for event in events_of(box.folder / "kept") if event["kind"] == "checkpoint_failed")
    metrics = (box.folder / "kept/metrics-0.jsonl").read_text().splitlines()
    asked = next(row["time"] for row in map(json.loads, metrics) if row["step"] == 5)
    assert failed["time"] - asked < 10.0
    assert "second 2" in done.stdout
    assert "error: Cannot use " in done.stderr
    assert "No space left on device" in done.stderr


def test_a_trainer_that_is_closed_without_its_last_checkpoint(here: Path) -> None:
    """The same from Python: nothing is raised before, so that the script may still save the model elsewhere."""
    (here / "run").mkdir()
    (here / "run/checkpoints").write_text("a file is in the way")
    trainer = make(run_dir="run")
    trainer.fit(steps=2)
    with pytest.raises(UserError, match="all that was trained is not on disk"):
        trainer.close()


def test_every_mistake_has_its_row() -> None:
    docs = DOCS.read_text().replace("\\<", "<")
    for mistake in [*MISTAKES, *MESHES]:
        assert f"| {mistake.did} |" in docs
        assert mistake.error.replace("{here}/", "") in docs, mistake.error
    for error in COMMANDS.values():
        assert error in docs
