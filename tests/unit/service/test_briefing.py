"""What a keeper is told to start on a cluster."""

from dataclasses import replace

from shoal.cluster.listing import Node as Machine
from shoal.place.cluster import Node
from shoal.place.decision import Place
from shoal.service.briefing import orders_for, places_of
from shoal.service.deciding import can_do
from shoal.service.job import Asked, Job
from shoal.service.machines import name_each
from shoal.service.settings import Settings
from shoal.service.transitions import change_size

ASKED = Asked(
    run_args=("train.py",),
    name="train",
    working_dir="/",
    cores=2.0,
    gpus=1.0,
    memory_bytes=1 << 30,
    is_elastic=True,
    max_workers=4,
)
JOB = Job(number=7, owner="ann", asked=ASKED, allocation={"anna": 2, "bert": 1}, max_workers=4)
ADDRESSES = {"anna": "10.0.0.1", "bert": "10.0.0.2"}


def machine(name: str, address: str) -> Machine:
    more = dict.fromkeys(("cores", "gpus", "memory_bytes", "free_cores", "free_gpus", "free_memory_bytes"), 1)
    return Machine(id=address, name=name, host=name, address=address, is_head=False, is_alive=True, labels={}, **more)


def test_on_a_cluster_workers_get_what_was_asked_for_on_the_nodes_that_were_chosen() -> None:
    argv = orders_for(JOB, Settings(), "ray", ADDRESSES).argv
    assert argv[:5] == ("--engine", "ray", "--threads", "2", "--env=SHOAL_JOB")
    assert argv[-1] == "train.py"
    assert dict(option.split("=", 1) for option in argv[6:-1:2]) == {
        "engine.cpus": "2",
        "engine.gpus": "1",
        "engine.memory": str(1 << 30),
        "engine.nodes": "10.0.0.1=2,10.0.0.2=1",
    }


def test_secrets_of_a_job_are_passed_on_to_its_workers_and_are_in_no_command() -> None:
    job = replace(JOB, asked=replace(ASKED, env={"TOKEN": "geheim"}, array=7, index=2))
    orders = orders_for(job, Settings(), "ray", ADDRESSES)
    assert [arg for arg in orders.argv if arg.startswith("--env")] == [
        "--env=TOKEN",
        "--env=SHOAL_JOB",
        "--env=SHOAL_ARRAY_INDEX",
    ]
    assert orders.env == {"TOKEN": "geheim", "SHOAL_JOB": "7", "SHOAL_ARRAY_INDEX": "2"}
    assert "geheim" not in " ".join(orders.argv)


def test_on_one_machine_nothing_is_said_of_nodes() -> None:
    assert orders_for(JOB, Settings(), "local", {}).argv == ("train.py",)


def test_a_node_whose_address_is_not_known_is_named() -> None:
    assert places_of(JOB.allocation, {"anna": "10.0.0.1"}) == {"10.0.0.1": 2, "bert": 1}


def test_machines_that_are_called_alike_are_told_apart() -> None:
    found = [machine("box", "10.0.0.1"), machine("anna", "10.0.0.2"), machine("box", "10.0.0.3")]
    assert {name: each.address for name, each in name_each(found).items()} == {
        "box-10.0.0.1": "10.0.0.1",
        "anna": "10.0.0.2",
        "box-10.0.0.3": "10.0.0.3",
    }


def test_workers_of_a_node_that_is_gone_get_places_on_another() -> None:
    job = replace(JOB, state="running", allocation={"anna": 2, "bert": 2})
    nodes = [Node(name=name, cores=4.0, gpus=2, memory_bytes=8 << 30) for name in ("anna", "carl")]
    there = {"anna": 2, "carl": 2}
    (todo,), _, _ = can_do([Place(job="7", allocation=there, why="")], {7: job}, nodes, {})
    assert change_size(job, todo.allocation, todo.devices, 1.0).allocation == there
