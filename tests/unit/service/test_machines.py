"""Machines that a job was lost with: nothing starts there until Ray has had the time to say so, too."""

from typing import Any

import pytest

from shoal.cluster import ask_ray
from shoal.engine.clusters import HEAD
from shoal.place.cluster import Node
from shoal.service import machines
from shoal.service.machines import DOUBT_SECONDS, Machines


def told(address: str) -> dict[str, Any]:
    amounts = dict.fromkeys(("cores", "gpus", "memory_bytes", "free_cores", "free_gpus", "free_memory_bytes"), 2)
    more = {"is_head": address == "10.0.0.1", "is_alive": True, "has_left": False, "started": 0.0, "group": ""}
    return {"id": address, "name": f"m{address[-1]}", "host": "", "address": address, "labels": {}, **amounts, **more}


@pytest.mark.parametrize("machine", ["10.0.0.2", "m2 (10.0.0.2)"])
def test_a_machine_that_a_job_was_lost_with_gets_nothing_for_a_while(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    now = [1000.0]
    monkeypatch.setattr(machines.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ask_ray, "ask_other", lambda address, bundles: [told("10.0.0.1"), told("10.0.0.2")])
    known = Machines(lambda: Node(name=HEAD))
    known._ask_other("10.0.0.1:6379")
    assert [node.is_draining for node in known._usable()] == [False, False]
    known.doubt(machine)
    assert {node.name: node.is_draining for node in known._usable()} == {"m1": False, "m2": True}
    now[0] += DOUBT_SECONDS + 1.0
    assert [node.is_draining for node in known._usable()] == [False, False]
