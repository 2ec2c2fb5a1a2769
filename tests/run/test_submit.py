"""`shoal submit` on real Ray: the run goes on without whoever asked for it, and can be followed, listed and ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Box, box

from shoal.testing.rigs.rays import RayCluster, ray_cluster

pytest.importorskip("ray", reason="Ray is not installed: pip install 'shoal[ray]'")

pytestmark = pytest.mark.timeout(300)
__all__ = ["box"]

TRAIN = """
import os, sys, time
import helper
print(helper.WORD, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ.get("SECRET"), sys.argv[1:])
until = sys.argv[1]
while until and not os.path.exists(until):
    time.sleep(0.05)
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""


@contextlib.contextmanager
def keeping_runs(home: Path, *, has_dashboard: bool = False) -> Iterator[RayCluster]:
    """A cluster on whose head runs are kept in a home that is not ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(home))
        patch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
        with ray_cluster(2, has_dashboard=has_dashboard) as cluster:
            cluster.env["HEAD_HOME"] = str(home)
            yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with keeping_runs(tmp_path_factory.mktemp("head")) as cluster:
        yield cluster


@pytest.fixture
def work(box: Box, cluster: RayCluster) -> Box:
    """A folder with a script that imports a module which is only there."""
    box.write("train.py", TRAIN)
    box.write("helper.py", "WORD = 'trained'")
    box.env |= cluster.env
    return box


def told(done: Any) -> Any:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_a_run_is_handed_over_followed_and_listed(work: Box, cluster: RayCluster) -> None:
    at = ("--address", cluster.address)
    given = told(
        work.run("submit", "-n", "1:2", *at, "--name", "one", "--env", "SECRET=x1", "--json", "train.py", "")
    )
    assert given["run"] == "one"
    assert given["folder"] == os.path.join(cluster.env["HEAD_HOME"], "runs", "one")
    assert given["commands"]["cancel"] == f"shoal cancel one --address {cluster.address}"
    followed = work.run("logs", "one", *at, "--follow")
    assert followed.returncode == 0, followed.stderr
    assert "trained rank 0 of" in followed.stdout
    assert "x1 ['']" in followed.stdout
    assert "Running entrypoint" not in followed.stdout
    assert "one: finished" in followed.stderr
    (row,) = [row for row in told(work.run("ps", *at, "--json")) if row["run"] == "one"]
    assert (row["status"], row["exit_code"], row["max_workers"]) == ("finished", 0, 2)
    assert "SECRET=***" in row["command"]
    with open(os.path.join(given["folder"], "run.json"), encoding="utf-8") as file:
        assert json.load(file)["status"] == "finished"


@pytest.mark.slow
def test_whoever_submitted_may_go_away(work: Box, cluster: RayCluster) -> None:
    at = ("--address", cluster.address)
    until = str(work.folder / "enough")
    asking = work.start("submit", "-n", "2", *at, "--name", "alone", "--follow", "train.py", until)
    assert asking.stdout is not None
    assert any("trained" in line for line in asking.stdout)
    os.kill(asking.pid, signal.SIGKILL)
    asking.communicate(timeout=30)
    watching = work.start("logs", "alone", *at, "--follow")
    assert watching.stdout is not None
    assert any("trained" in line for line in watching.stdout)
    watching.send_signal(signal.SIGINT)
    words = watching.communicate(timeout=30)[1]
    assert watching.returncode == 130
    assert "alone goes on" in words
    (row,) = [row for row in told(work.run("ps", *at, "--json")) if row["run"] == "alone"]
    assert row["status"] == "running"
    assert row["num_workers"] == 2
    (work.folder / "enough").touch()
    assert work.run("logs", "alone", *at, "--follow").returncode == 0


@pytest.mark.slow
def test_a_run_is_cancelled_and_goes_on_later(work: Box, cluster: RayCluster) -> None:
    at = ("--address", cluster.address)
    told(work.run("submit", "-n", "2", *at, "--name", "ended", "--json", "train.py", str(work.folder / "never")))
    folder = os.path.join(cluster.env["HEAD_HOME"], "runs", "ended")
    work.wait_for(lambda: os.path.exists(os.path.join(folder, "logs", "1.log")), 60)
    again = work.run("submit", *at, "--name", "ended", "train.py", "")
    assert again.returncode == 2
    assert "There is a run 'ended' on the cluster already." in again.stderr
    still = work.run("submit", *at, "--resume", "ended", "train.py", "")
    assert "Run 'ended' has not ended." in still.stderr
    cancelled = told(work.run("cancel", "ended", *at, "--json"))
    assert (cancelled["status"], cancelled["was_running"]) == ("stopped", True)
    with open(os.path.join(folder, "run.json"), encoding="utf-8") as file:
        assert json.load(file)["status"] == "stopped", "its launcher was told, and not killed"
    assert told(work.run("cancel", "ended", *at, "--json"))["was_running"] is False
    assert told(work.run("submit", "-n", "2", *at, "--resume", "ended", "--json", "train.py", ""))["id"] == "ended.2"
    followed = work.run("logs", "ended", *at, "--follow")
    assert followed.returncode == 0, followed.stderr
    assert "ended: finished" in followed.stderr


@pytest.mark.slow
def test_through_a_dashboard_from_outside_the_cluster(work: Box, tmp_path: Path) -> None:
    """And the code of a run that fails is that of the command that follows it."""
    with keeping_runs(tmp_path / "head", has_dashboard=True) as cluster:
        work.env |= cluster.env
        at = ("--address", cluster.dashboard)
        failed = work.run("submit", "-n", "2", *at, "--name", "seven", "--env", "ENDS_WITH=7", "-f", "train.py", "")
        assert failed.returncode == 7, failed.stderr
        assert "trained rank" in failed.stdout
        assert "seven: failed" in failed.stderr
        listed = work.run("ps", *at)
        assert "failed (7)" in listed.stdout
        shown = work.run("logs", "seven", *at)
        assert shown.returncode == 0
        assert "trained rank 1" in shown.stdout
        cancelled = told(work.run("cancel", "seven", *at, "--json"))
        assert cancelled["was_running"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-n", "64", "train.py"), "has room for 2 workers, and 64 are needed"),
        (("--resume", "nobody", "train.py"), "There is no run 'nobody' on the cluster."),
        (("ignored.py",), "'ignored.py' would not be copied to the cluster."),
        (("-o", "engine.cpus=many", "train.py"), "engine.cpus is 'many'"),
    ],
)
def test_what_cannot_be_is_told_before_it_is_submitted(work: Box, cluster: RayCluster, args: Any, words: str) -> None:
    work.write("ignored.py", "")
    work.write(".gitignore", "ignored.py\n")
    done = work.run("submit", "--address", cluster.address, *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_folder_that_is_too_large(work: Box, cluster: RayCluster) -> None:
    with open(work.folder / "data.bin", "wb") as file:
        file.truncate(300 << 20)
    done = work.run("submit", "--address", cluster.address, "train.py")
    assert done.returncode == 2
    assert "is too large to be copied to the cluster: 300 MiB" in done.stderr
    assert "data.bin 300 MiB" in done.stderr


@pytest.mark.slow
def test_another_shoal_and_another_token_are_told(work: Box, cluster: RayCluster) -> None:
    code = """
        import sys
        import shoal.version
        shoal.version.__version__ = "0.0.9"
        import runpy
        sys.argv = ["ray_jobs"]
        runpy.run_module("shoal.cluster.ray_jobs", run_name="__main__")
    """
    work.write("older.py", code)
    question = {"verb": "submit", "address": cluster.address}
    facts = {"name": "x", "run_args": ["--", "train.py"], "folder": str(work.folder), "num_workers": 1}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "older.py"], cwd=work.folder, env=work.env, **streams) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None
        asking.stdin.write(json.dumps({**question, "facts": facts}) + "\n")
        asking.stdin.flush()
        assert "and this machine 0.0.9" in asking.stdout.read()
    work.write("token", "0" * 64)
    work.env |= {"RAY_AUTH_TOKEN_PATH": str(work.folder / "token")}
    done = work.run("ps", "--address", cluster.address)
    assert done.returncode != 0
    assert "There is no Ray cluster at" in done.stderr
    assert "Traceback" not in done.stderr
