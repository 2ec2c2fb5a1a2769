"""Runs that fall ill say what they have, and who: real processes, real faults."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks import diagnose
from shoal.comm.reach import find_unreached, try_all
from shoal.observe.metrics import read
from shoal.observe.runs import read_run
from shoal.observe.trace import FIRST_RANK_PID, Window
from shoal.observe.trace_file import write_trace
from shoal.testing import Faults, FaultyRun, rigs

SCRIPT = """
import os, sys, time, torch, shoal
from torch import nn

torch.manual_seed(0)
width = 33 if "odd" in sys.argv and os.environ["RANK"] == "1" else 32
model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
data = torch.randn(4096, 8), torch.randn(4096, 1)

def loss(model, batch):
    time.sleep(0.0004 * len(batch[0]))
    return (model(batch[0]) - batch[1]).square().mean()

optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
shoal.Trainer(model, loss, optimizer, data, batch_size=32, balance=False).fit(steps=int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def told(run: FaultyRun) -> list[tuple[str, int | None]]:
    return [(event.data["cause"], event.rank) for event in run.of("diagnosis")]


def test_a_slow_rank_then_a_loss_that_is_no_number_then_a_flipped_bit(script: str) -> None:
    """Over sockets, where lateness has an owner too."""
    faults = Faults().slow(1, 30, 0.05, 60, at="forward").nan(0, 100).corrupt(1, 110)
    run = faults.run(script, "150", num_workers=2, options={"transport": "tcp"})
    assert run.exit_code == 0
    assert [each for each in told(run) if each[0] not in ("no_core", "busy_elsewhere")] == [
        ("slow_compute", 1),
        ("nan", 0),
        ("diverged", 1),
    ]
    (slow,) = [event for event in run.of("diagnosis") if event.data["cause"] == "slow_compute"]
    assert slow.data["cost"] > 20
    assert {"message", "why", "hint"} <= slow.data.keys()
    steps = [row for row in read(run.run_dir)[0] if 40 <= row.step < 85]
    late = [row for row in steps if row.waited_for == 1]
    assert len(late) > 0.8 * len(steps)
    assert sum(row.wait for row in late) > 0.5 * sum(row.compute for row in late)


def test_a_model_of_another_shape_is_named_with_its_rank(script: str) -> None:
    run = Faults().run(script, "5", "odd", num_workers=2)
    assert run.exit_code == 2
    assert told(run) == [("shape_mismatch", 1)]
    (found,) = run.of("diagnosis")
    assert found.data["why"] == "it has 0.weight [33, 8] float32 where rank 0 has 0.weight [32, 8] float32"


@pytest.mark.slow
@pytest.mark.timeout(300)
@rigs.needs("root", "ip", "tc", "nsenter", "network namespaces", "mounting", "mpirun", "libfaketime")
@pytest.mark.parametrize("name", sorted({each.name for each in diagnose.illnesses(None)}))
def test_every_illness_is_named(name: str) -> None:
    (trial,) = diagnose.measure(1, (name,))[name]
    assert trial["verdict"] in ("right", "late"), trial


@pytest.mark.slow
@pytest.mark.timeout(300)
@rigs.needs("root", "ip", "tc", "nsenter", "network namespaces", "mounting", "mpirun", "libfaketime")
def test_a_trace_puts_a_host_right_whose_clock_is_off(tmp_path: Path) -> None:
    """One of three hosts lives 45 s ahead: what its rank wrote down says so, and the trace does not."""
    with diagnose.make_cluster() as cluster:
        assert cluster is not None
        cluster.clock.jump(45.0)
        skewed = next(each for each in diagnose.illnesses(cluster) if each.name == "clock_skew")
        with diagnose.start(skewed, 1, cluster, False) as run:
            assert diagnose.wait_until(lambda: run.last_step() >= 40, 150), (run.folder / "terminal").read_text()
            info = read_run(str(run.run_dir))
            assert info is not None
            written = write_trace(info, str(tmp_path / "trace.json"), Window())
            raw = read(str(run.run_dir))
    assert abs(raw[1][20].time - raw[0][20].time - 45.0) < 2.0
    assert abs(written.clocks[1]["offset_seconds"] - 45.0) < 1.0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {(event["pid"], event["name"]): event for event in events if event.get("cat") == "step"}
    inside = {event["pid"] for event in events if event.get("cat") == "collective"}
    assert inside == {FIRST_RANK_PID + rank for rank in range(3)}
    for number in range(15, 35):
        first, other = (steps[FIRST_RANK_PID + rank, f"step {number}"] for rank in (0, 1))
        # All end a step together.
        assert abs(first["ts"] + first["dur"] - other["ts"] - other["dur"]) < 1e6


def test_who_is_missed_by_most_cannot_be_reached() -> None:
    assert find_unreached([[], [], []]) is None
    assert find_unreached([[1], [], [1]]) == (1, [0, 2])
    assert find_unreached([[1], [0, 2], [1]]) == (1, [0, 2])


def test_a_place_where_nobody_listens_is_not_reached() -> None:
    def listen(stack: Any) -> tuple[str, int]:
        stack.listen(1)
        return ("127.0.0.1", stack.getsockname()[1])

    with socket.socket() as open_one, socket.socket() as closed_one:
        for each in (open_one, closed_one):
            each.bind(("127.0.0.1", 0))
        places = {3: listen(open_one), 5: ("127.0.0.1", closed_one.getsockname()[1])}
        assert try_all(places, 5.0) == [5]
