"""What each worker computes with is decided from what its machine has."""

import pytest
import torch

from shoal.comm.staged import choose_transport, must_stage
from shoal.engine.env import WorkerFacts
from shoal.spec.errors import UserError
from shoal.train.device import choose_device, choose_precision, multiply_seconds, set_threads
from shoal.train.settings import Settings, make_settings


@pytest.mark.parametrize(
    ("asked", "local_rank", "num_gpus", "device"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 0, 1, "cuda:0"),
        ("auto", 1, 1, "cpu"),
        ("auto", 3, 4, "cuda:3"),
        ("cpu", 0, 4, "cpu"),
        ("cuda", 2, 4, "cuda:2"),
        ("cuda:0", 2, 1, "cuda:0"),
    ],
)
def test_a_worker_has_the_gpu_with_its_number(asked: str, local_rank: int, num_gpus: int, device: str) -> None:
    assert str(choose_device(asked, local_rank, num_gpus)) == device


@pytest.mark.parametrize(("asked", "local_rank", "num_gpus"), [("cuda", 0, 0), ("cuda", 1, 1), ("cuda:4", 0, 4)])
def test_a_gpu_that_is_not_there(asked: str, local_rank: int, num_gpus: int) -> None:
    with pytest.raises(UserError, match="is not there") as caught:
        choose_device(asked, local_rank, num_gpus)
    assert 'device="auto"' in caught.value.hint


def test_bf16_is_used_where_it_is_faster() -> None:
    assert choose_precision("auto", lambda: True) == "bf16"
    assert choose_precision("auto", lambda: False) == "float32"
    assert choose_precision("float32", lambda: True) == "float32"
    assert 0 < multiply_seconds(torch.float32) < 1


def test_threads_are_this_machines_cores() -> None:
    before = torch.get_num_threads()
    try:
        set_threads(Settings(batch_size=1, threads="auto"), WorkerFacts(local_world_size=10_000))
        assert torch.get_num_threads() == 1
        set_threads(Settings(batch_size=1, threads=2), WorkerFacts(local_world_size=10_000))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("devices", "asked", "transport", "staged"),
    [
        (["cpu", "cpu"], "auto", "auto", [False, False]),
        (["cuda", "cuda"], "auto", "tcp", [False, False]),
        (["cuda", "cpu"], "shm", "tcp", [True, False]),
        (["cpu", "cuda", "cuda"], "auto", "tcp", [False, True, True]),
    ],
)
def test_gpus_talk_by_themselves_or_through_main_memory(
    devices: list[str], asked: str, transport: str, staged: list[bool]
) -> None:
    assert choose_transport(asked, devices) == transport
    assert [must_stage(device, devices, has_nccl=True) for device in devices] == staged
    assert [must_stage(device, devices, has_nccl=False) for device in devices] == [d == "cuda" for d in devices]


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 << 30), ("1.5GiB", 3 << 29), ("100MB", 100 << 20), ("4096", 4096), ("none", None)]
)
def test_memory_is_said_as_people_say_it(text: str, size: int | None) -> None:
    assert make_settings({"batch_size": 1}, {"memory": text})[0].memory == size
    if size is not None:
        assert make_settings({"batch_size": 1, "memory": text}, {})[0].memory == size


@pytest.mark.parametrize("text", ["lots", "-1", "0", "2XB", "nan", "inf"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match=r"memory=.* does not work"):
        make_settings({"batch_size": 1}, {"memory": text})


@pytest.mark.parametrize("name", ["precision", "threads"])
def test_exact_runs_leave_nothing_to_the_machine(name: str) -> None:
    with pytest.raises(UserError, match=f'exact=True and {name}="auto" exclude each other'):
        make_settings({"batch_size": 1, "exact": True, name: "auto"}, {})
    assert getattr(make_settings({"batch_size": 1}, {name: "auto"})[0], name) == "auto"


def test_a_device_is_named_as_torch_does() -> None:
    assert make_settings({"batch_size": 1, "device": torch.device("cuda", 1)}, {})[0].device == "cuda:1"
    with pytest.raises(UserError, match="device='gpu' does not work"):
        make_settings({"batch_size": 1, "device": "gpu"}, {})
