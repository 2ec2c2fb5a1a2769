"""When faults strike in a worker: once, at their step and point, in the process they are meant for."""

import os

import pytest
import torch

from shoal.engine.env import WorkerFacts, read_worker
from shoal.observe.folder import write_facts
from shoal.observe.journal import read
from shoal.spec.errors import Retryable, UserError
from shoal.testing.faults import Faults
from shoal.train import faulty
from shoal.train.faulty import FaultError, FaultPlan, read_faults
from shoal.train.rigged import is_rigged_network, rigged_disk


def plan_of(faults: Faults, run_dir, *, rank: int = 0, incarnation: int = 0) -> FaultPlan:
    plan = read_faults(
        WorkerFacts(rank=rank, incarnation=incarnation, faults=faults.to_json()), str(run_dir) if run_dir else None
    )
    assert plan is not None
    return plan


def strikes(plan: FaultPlan, point: str, steps) -> list[int]:
    """The steps in which a `fail` struck."""
    struck = []
    for step in steps:
        try:
            plan.reach(point, step)
        except FaultError:
            struck.append(step)
    return struck


def test_without_faults_there_is_no_plan(tmp_path):
    assert read_faults(WorkerFacts(), None) is None
    assert read_faults(WorkerFacts(faults="[]"), None) is None
    others = Faults().kill(rank=1, step=0).kill(rank=0, step=0, incarnation=3)
    assert read_faults(WorkerFacts(rank=0, faults=others.to_json()), None) is None


def test_the_variable_reaches_the_worker():
    faults = Faults().fail(rank=0, step=0)
    assert read_worker(faults.env()).faults == faults.to_json()


def test_a_file_named_by_the_variable(tmp_path):
    Faults().fail(rank=0, step=0).write(tmp_path / "f.json")
    plan = read_faults(WorkerFacts(faults=f"@{tmp_path}/f.json"), None)
    assert plan is not None
    assert strikes(plan, "forward", [0]) == [0]
    with pytest.raises(UserError, match="Cannot read the faults"):
        read_faults(WorkerFacts(faults=f"@{tmp_path}/none.json"), None)
    with pytest.raises(UserError, match="SHOAL_FAULTS is not JSON"):
        read_faults(WorkerFacts(faults="nonsense"), None)


@pytest.mark.parametrize("has_folder", [True, False])
def test_it_strikes_once_at_its_step_and_point(tmp_path, has_folder):
    plan = plan_of(Faults().fail(rank=0, step=3, at="updating"), tmp_path if has_folder else None)
    assert strikes(plan, "start", range(6)) == []
    assert strikes(plan, "updating", [0, 1, 2, 3, 3, 4, 3]) == [3]


def test_neither_a_replacement_nor_a_resumed_run_meets_it_again(tmp_path):
    faults = Faults().fail(rank=0, step=3, incarnation=None)
    assert strikes(plan_of(faults, tmp_path), "forward", range(5)) == [3]
    assert strikes(plan_of(faults, tmp_path, incarnation=1), "forward", range(3, 9)) == []
    resumed = Faults().fail(rank=0, step=3)
    assert strikes(plan_of(resumed, tmp_path), "forward", range(5)) == []


def test_a_fault_for_whoever_has_the_rank_waits_for_them(tmp_path):
    faults = Faults().fail(rank=0, step=3, incarnation=None).fail(rank=0, step=4, incarnation=None)
    assert strikes(plan_of(faults, tmp_path, incarnation=1), "forward", [7, 8, 9]) == [7, 8]
    on_time = Faults().fail(rank=0, step=3)
    assert strikes(plan_of(on_time, tmp_path / "other"), "forward", [7, 8, 9]) == []


def test_a_time_counts_from_the_start_of_the_run(tmp_path):
    write_facts(str(tmp_path), {"created": 1000.0})
    now = 1001.0
    fault = next(iter(Faults().fail(rank=0, after_seconds=2)))
    plan = FaultPlan({0: fault}, rank=0, run_dir=str(tmp_path), clock=lambda: now)
    assert strikes(plan, "forward", [0, 1]) == []
    now = 1002.5
    assert strikes(plan, "forward", [2, 3]) == [2]


def test_strikes_are_in_the_journal(tmp_path):
    plan = plan_of(Faults().fail(rank=0, step=2, error="no").slow(rank=0, step=1, seconds=0, steps=3), tmp_path)
    for point in ("start", "forward"):
        strikes(plan, point, range(5))
    events = list(read(str(tmp_path / "journal.jsonl")))
    assert [(event.kind, event.rank, event.step, event.data["kind"]) for event in events] == [
        ("fault", 0, 1, "slow"),
        ("fault", 0, 2, "fail"),
    ]
    assert events[1].data["error"] == "no"


def test_slow_steps_in_a_row(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(faulty.time, "sleep", slept.append)
    plan = plan_of(Faults().slow(rank=0, step=5, seconds=0.25, steps=3), tmp_path)
    for step in (4, 5, 5, 6, 7, 8, 9):  # a step is redone after a loss: it is not slow again
        plan.reach("start", step)
    assert slept == [0.25] * 3


def test_what_cannot_be_noted_does_not_strike(tmp_path, capsys):
    (tmp_path / "faults").write_text("a file is in the way")
    plan = plan_of(Faults().fail(rank=0, step=3), tmp_path)
    assert strikes(plan, "forward", range(9)) == []
    assert "cannot be noted and is left out" in capsys.readouterr().err


def test_errors_that_may_be_retried(tmp_path):
    plan = plan_of(Faults().fail(0, 1, "gone", retryable=True).fail(0, 2, "wrong"), tmp_path)
    with pytest.raises(Retryable, match="gone"):
        plan.reach("forward", 1)
    with pytest.raises(FaultError, match="wrong"):
        plan.reach("forward", 2)


def test_losses_that_are_not_numbers(tmp_path):
    plan = plan_of(Faults().nan(rank=0, step=2, steps=2), tmp_path)
    loss = torch.tensor(1.5, requires_grad=True)
    spoiled = [bool(plan.spoil(loss, step).isnan()) for step in (0, 1, 2, 3, 4, 2, 3)]
    assert spoiled == [False, False, True, True, False, False, False]
    assert plan.spoil(loss, 5) is loss


def test_one_flipped_bit(tmp_path):
    plan = plan_of(Faults().corrupt(rank=0, step=2), tmp_path)
    weights = torch.nn.Parameter(torch.tensor([1.0, -8.0, 0.0]))
    for step in range(5):
        plan.corrupt(weights, step)
    assert weights.tolist() == [1.0, -12.0, 0.0], "of the largest, one that matters"


@pytest.mark.parametrize(("dtype", "bit", "flipped"), [
    (torch.float32, 31, -1.5), (torch.float32, 0, 1.5 + 2**-23), (torch.float32, 23, 0.75),
    (torch.float64, None, 1.0), (torch.float64, 63, -1.5), (torch.bfloat16, None, 1.0), (torch.bfloat16, 15, -1.5),
])  # fmt: skip
def test_any_bit_can_be_flipped(tmp_path, dtype, bit, flipped):
    weights = torch.tensor([0.5, 1.5, 1.0], dtype=dtype)
    plan_of(Faults().corrupt(rank=0, step=0, bit=bit), tmp_path).corrupt(weights, 0)
    assert weights.tolist() == [0.5, flipped, 1.0]


def test_what_cannot_be_flipped(tmp_path):
    with pytest.raises(UserError, match=r"no bit 16 in a torch\.bfloat16") as caught:
        plan_of(Faults().corrupt(rank=0, step=0, bit=16), tmp_path).corrupt(torch.ones(3, dtype=torch.bfloat16), 0)
    assert "0 to 15" in caught.value.hint
    weights = torch.ones(3)
    with pytest.raises(UserError, match="would change the parameters of all workers"):
        plan_of(Faults().corrupt(rank=0, step=0), tmp_path / "other").corrupt(weights, 0, is_shared=True)
    assert (weights == 1).all()


def test_real_disks_and_networks_are_left_alone(tmp_path):
    assert rigged_disk(str(tmp_path)) is None
    assert rigged_disk("/") is None
    assert not is_rigged_network()
    before = set(os.listdir(tmp_path))
    with pytest.raises(UserError, match="may not fill the disk of"):
        plan_of(Faults().disk_full(after_step=0), tmp_path).reach("updated", 0)
    assert set(os.listdir(tmp_path)) - before == {"faults", "journal.jsonl"}
    with pytest.raises(UserError, match="may not cut the links of this machine"):
        plan_of(Faults().partition(rank=0, step=0), None).reach("start", 0)
    with pytest.raises(UserError, match="finds no launcher"):
        plan_of(Faults().kill_launcher(step=0), None).reach("start", 0)
