"""What is kept of a run while it goes on: numbers of the user's own from every worker, and what machines did."""

import os

from launching import Box, box

from shoal.observe.runs import list_runs
from shoal.observe.series import SeriesReader
from shoal.observe.system import SystemReader

__all__ = ["box"]


def test_numbers_of_all_workers_and_samples_of_the_machine(box: Box) -> None:
    box.write(
        "train.py",
        """
        import glob, os, time, shoal
        rank = int(os.environ["RANK"])
        shoal.log({"rank": rank, "<b>\\x1b[2J": 1.0}, step=5)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            files = glob.glob(os.environ["SHOAL_RUN_DIR"] + "/system-*.jsonl")
            if files and open(files[0]).read().count("\\n") >= 2:
                break
            time.sleep(0.05)
        """,
    )
    done = box.run("run", "-n", "2", "train.py")
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(str(box.home))
    found = SeriesReader(run.path).read(["rank", "<b>"])
    assert (found["rank"].steps, found["rank"].low, found["rank"].high) == ([5], [0.0], [1.0])
    assert found["<b>"].mean == [1.0]
    ((node, samples),) = SystemReader(run.path).read_new().items()
    assert node == os.uname().nodename
    assert {rank for sample in samples for rank in sample.workers} == {0, 1}
    assert all(worker.rss > 1 << 20 for worker in samples[0].workers.values())
