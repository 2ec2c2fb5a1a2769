"""`shoal run --engine spark`: workers inside tasks of Spark, on this machine and on executors of a small cluster."""

import importlib.util
import os
import re
import shutil
import signal

import psutil
import pytest
from launching import Box, box, small_cluster

from shoal.testing.rigs.machine import LACKS

__all__ = ["box"]

PYSPARK = importlib.util.find_spec("pyspark")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(PYSPARK is None, reason=f"{LACKS} pyspark"),
    pytest.mark.skipif(shutil.which("java") is None, reason=f"{LACKS} java"),
]
SESSION_SECONDS = 200.0
"""Spark takes 4 s to start, on a machine with nothing else to do."""
ALLOCATION = "spark.dynamicAllocation"
EXECUTOR = "CoarseGrainedExecutorBackend"

TRAIN = """
    import os, sys, time
    import torch
    from torch import nn
    import torch.nn.functional as F
    import shoal

    def train(exact, rounds, epochs):
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(64, 4, generator=generator), torch.randint(0, 3, (64,), generator=generator)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        losses = []

        def loss(model, batch):
            time.sleep(0.5 if "wait" in sys.argv and not os.path.exists("finish") else 0.0)
            return F.cross_entropy(model(batch[0]), batch[1])

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with shoal.Trainer(model, loss, optimizer, data, batch_size=16, exact=exact) as trainer:
            for _ in range(rounds):
                trainer.fit(epochs=epochs)
                losses.append(F.cross_entropy(model(data[0]), data[1]).item())
            return trainer.digest(), losses
"""


def on_spark(master: str, *args: str, size: str = "2") -> tuple[str, ...]:
    return ("run", "-n", size, "--engine", "spark", "--master", master, *args)


def test_a_script_for_torchrun_runs_and_what_failed_is_told(box: Box) -> None:
    source = """
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.full((3,), float(dist.get_rank() + 1))
        dist.all_reduce(x)
        print("sum", x.tolist(), os.environ["LOCAL_WORLD_SIZE"])
        if dist.get_rank() == 1:
            raise ValueError("the loss is bad")
        dist.all_reduce(x)
    """
    box.write("train.py", source)
    done = box.run(*on_spark("local[2]", "train.py"), timeout=SESSION_SECONDS)
    assert done.returncode == 1
    assert box.log(0).startswith("sum [3.0, 3.0, 3.0] 2\n")
    assert box.log(1).startswith("sum [3.0, 3.0, 3.0] 2\n")
    lines = [line for line in done.stderr.splitlines() if "waiting for machines" not in line]
    assert lines[:2] == ["error: ValueError: the loss is bad", "   at: rank 1, train.py:11"]


def results(text: str) -> tuple[str, list[float]]:
    """What the script printed: a digest and losses."""
    digest = re.search(r"digest (\w+)", text)
    losses = re.search(r"losses (.*)", text)
    assert digest is not None
    assert losses is not None
    return digest[1], [float(loss) for loss in losses[1].split()]


@pytest.mark.slow
def test_a_trainer_computes_what_it_computes_without_spark(box: Box) -> None:
    source = TRAIN + "\n    digest, losses = train(True, 2, 1)\n    _, plain = train(False, 3, 1)\n"
    box.write("train.py", source + '    print("digest", digest)\n    print("losses", *losses, *plain)\n')
    threads = ("--threads", "1", "--name")
    here = box.run("run", "-n", "2", *threads, "here", "train.py", timeout=SESSION_SECONDS)
    there = box.run(*on_spark("local[2]", *threads, "there", "train.py"), timeout=SESSION_SECONDS)
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    (digest, losses), (digest_there, losses_there) = results(here.stdout), results(there.stdout)
    assert digest == digest_there
    assert losses_there == pytest.approx(losses, abs=1e-6)


def test_java_is_asked_for_where_there_is_none(box: Box) -> None:
    box.write("train.py", "print('never')")
    box.env["JAVA_HOME"] = str(box.folder / "jdk")
    done = box.run(*on_spark("local[2]", "train.py"))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: Java was not found.\n  why: Spark runs in it\n   do: install a JDK, 17 or newer"
    )
    java = box.write(
        "jdk/bin/java", "#!/bin/sh\necho UnsupportedClassVersionError: class file version 61.0 >&2; exit 1"
    )
    java.chmod(0o755)
    done = box.run(*on_spark("local[2]", "train.py"))
    assert done.returncode == 2
    assert "error: This Java is too old for this Spark.\n  why: Spark was made for Java 17 or newer" in done.stderr


def test_a_master_that_does_not_answer_is_told_at_once(box: Box) -> None:
    box.write("train.py", "print('never')")
    done = box.run(*on_spark("spark://127.0.0.1:1", "train.py"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: No Spark master answers at spark://127.0.0.1:1.\n  why: 127.0.0.1:1: ")


@pytest.mark.slow
def test_ctrl_c_ends_everything(box: Box) -> None:
    box.write("train.py", "import os, time\nopen('up' + os.environ['RANK'], 'w')\ntime.sleep(300)\n")
    launcher = box.start(*on_spark("local[2]", "train.py"))
    box.wait_for(lambda: (box.folder / "up0").exists() and (box.folder / "up1").exists(), SESSION_SECONDS)
    launcher.send_signal(signal.SIGINT)
    shown, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "shoal: stopped by Ctrl-C after" in told
    assert "Traceback" not in shown + told
    assert "py4j" not in shown + told
    box.wait_for_peace()


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_nothing_behind(box: Box) -> None:
    box.write("train.py", "import os, time\nopen('up' + os.environ['RANK'], 'w')\ntime.sleep(300)\n")
    launcher = box.start(*on_spark("local[2]", "train.py"))
    box.wait_for(lambda: (box.folder / "up0").exists() and (box.folder / "up1").exists(), SESSION_SECONDS)
    launcher.kill()
    launcher.communicate(timeout=60)
    box.wait_for_peace()


@pytest.mark.slow
def test_more_executors_than_there_will_be_are_not_waited_for(box: Box) -> None:
    box.write("train.py", "print('never')")
    small_cluster(box)
    done = box.run(*on_spark("local-cluster[1,1,1024]", "train.py"), timeout=SESSION_SECONDS)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Spark has 1 slot for tasks, and 2 workers are needed.\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_executors_come_when_workers_wait_for_them(box: Box) -> None:
    """Dynamic allocation: Spark has nobody until there is a job, and a run is one."""
    box.write("train.py", "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    small_cluster(box)
    settings = {"enabled": "true", "shuffleTracking.enabled": "true", "minExecutors": "0", "initialExecutors": "0"}
    options = [word for name, value in settings.items() for word in ("-o", f"engine.{ALLOCATION}.{name}={value}")]
    done = box.run(*on_spark("local-cluster[2,1,1024]", *options, "train.py"), timeout=500)
    assert done.returncode == 0, done.stderr
    assert "Spark has 0 slots for tasks, and 2 are wanted" in done.stderr
    assert [box.log(rank) for rank in range(2)] == ["rank 0 of 2\n", "rank 1 of 2\n"]


def worker_pid(box: Box, rank: int) -> int:
    return int([e["data"]["pid"] for e in box.events() if e["kind"] == "worker_started" and e["rank"] == rank][-1])


def executor_of(worker: int) -> psutil.Process:
    """The JVM that a worker is under: it is a child of an agent in a Python of Spark's."""
    return next(each for each in psutil.Process(worker).parents() if any(EXECUTOR in part for part in each.cmdline()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_elastic_run_goes_on_without_a_worker_and_without_an_executor(box: Box) -> None:
    box.write("train.py", TRAIN + '\n    digest, _ = train(True, 1, 160)\n    print("digest", digest)\n')
    (box.folder / "finish").touch()
    clean = box.run("run", "-n", "1", "--name", "clean", "--threads", "1", "train.py", timeout=SESSION_SECONDS)
    (box.folder / "finish").unlink()
    (box.home / "runs" / "clean").rename(box.folder / "clean")
    small_cluster(box)
    args = ("--threads", "1", "--name", "r", "train.py", "wait")
    launcher = box.start(*on_spark("local-cluster[2,1,1024]", *args, size="1:2"))
    try:
        box.wait_for(lambda: box.num_members("r") == 2 or launcher.poll() is not None, 2 * SESSION_SECONDS)
        assert launcher.poll() is None, launcher.communicate()
        first, executors = worker_pid(box, 0), [executor_of(worker_pid(box, rank)).pid for rank in range(2)]
        assert executors[0] != executors[1]

        os.kill(worker_pid(box, 1), signal.SIGKILL)
        box.wait_for(lambda: count(box, "worker_joined") == 1, SESSION_SECONDS)
        assert executor_of(worker_pid(box, 1)).pid == executors[1], "the worker is lost, not its executor"

        os.kill(executors[1], signal.SIGKILL)
        box.wait_for(lambda: count(box, "worker_lost") == 2, SESSION_SECONDS)
        box.wait_for(lambda: count(box, "worker_joined") == 2, SESSION_SECONDS)
        assert executor_of(worker_pid(box, 1)).pid not in executors
        assert worker_pid(box, 0) == first, "the other was not touched"
        (box.folder / "finish").touch()
        shown, told = launcher.communicate(timeout=SESSION_SECONDS)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, told
    assert "shoal: lost rank 1 (killed by SIGKILL); going on with 1 worker\n" in told
    assert "shoal: rank 1 is back; 2 workers\n" in told
    assert re.findall(r"digest (\w+)", shown) == re.findall(r"digest (\w+)", clean.stdout)


def count(box: Box, kind: str) -> int:
    return sum(event["kind"] == kind for event in box.events())
