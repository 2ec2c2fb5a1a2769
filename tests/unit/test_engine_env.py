import json
import os

import pytest

from shoal.engine.env import RunFacts, WorkerFacts, read_worker, shoal_home, task_env, worker_env
from shoal.spec.errors import UserError
from shoal.spec.job import Job, Seat

RUN = RunFacts(
    name="r", dir="/runs/r", num_workers=3, master_port=4711, worker_addresses=("127.0.0.1:1", "h:2", "h:3")
)
JOB = Job(script="train.py")


def seat(rank: int, num_local: int = 3, cores: int = 8) -> Seat:
    return Seat(local_rank=rank, num_local=num_local, cores=cores)


def test_a_worker_has_every_variable_of_torchrun() -> None:
    env = worker_env(JOB, 2, RUN, seat(2), {})
    assert {name: env[name] for name in env if name.isupper() and not name.startswith("SHOAL")} == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "0",
        "ROLE_RANK": "2",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "r",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/runs/r/logs/2.error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 1, "8"), (8, 2, "4"), (2, 3, "1"), (7, 2, "3")])
def test_threads_fit_the_cores(cores: int, workers: int, threads: str) -> None:
    assert worker_env(JOB, 0, RUN, seat(0, workers, cores), {})["OMP_NUM_THREADS"] == threads


def test_threads_that_the_user_set_stay() -> None:
    env = worker_env(JOB, 0, RUN, seat(0), {"OMP_NUM_THREADS": "5"})
    assert env["OMP_NUM_THREADS"] == "5"
    assert "MKL_NUM_THREADS" not in env
    assert worker_env(JOB, 0, RUN, seat(0), {"MKL_NUM_THREADS": "7"})["MKL_NUM_THREADS"] == "7"
    asked = worker_env(Job(script="a.py", threads_per_worker=4), 0, RUN, seat(0), {"OMP_NUM_THREADS": "5"})
    assert (asked["OMP_NUM_THREADS"], asked["MKL_NUM_THREADS"]) == ("4", "4")


def test_facts_win_over_an_outer_launcher_and_the_user_over_everything() -> None:
    job = Job(script="a.py", env={"MASTER_ADDR": "10.0.0.1", "MINE": "1"})
    env = worker_env(
        job, 1, RUN, seat(1), {"RANK": "17", "WORLD_SIZE": "99", "HOME": "/h", "GLOO_SOCKET_IFNAME": "eth7"}
    )
    assert (env["RANK"], env["WORLD_SIZE"], env["HOME"]) == ("1", "3", "/h")
    assert (env["MASTER_ADDR"], env["MINE"], env["GLOO_SOCKET_IFNAME"]) == ("10.0.0.1", "1", "eth7")


def test_the_environment_given_is_not_changed() -> None:
    inherited = {"A": "1"}
    worker_env(JOB, 0, RUN, seat(0), inherited)
    assert inherited == {"A": "1"}


def test_tensorflow_learns_of_all_workers() -> None:
    env = worker_env(Job(script="a.py", framework="tensorflow"), 1, RUN, seat(1), {})
    assert json.loads(env["TF_CONFIG"]) == {
        "cluster": {"worker": ["127.0.0.1:1", "h:2", "h:3"]},
        "task": {"type": "worker", "index": 1},
    }
    assert "TF_CONFIG" not in worker_env(JOB, 1, RUN, seat(1), {})


def test_jax_learns_where_process_0_is_and_who_it_is() -> None:
    env = worker_env(Job(script="a.py", framework="jax"), 1, RUN, seat(1), {"OMPI_COMM_WORLD_RANK": "7"})
    assert {name: env[name] for name in env if name.startswith(("JAX_", "OMPI_"))} == {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:1",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "1",
        "OMPI_MCA_orte_hnp_uri": "127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    assert "JAX_PROCESS_ID" not in worker_env(JOB, 1, RUN, seat(1), {})


def test_a_worker_of_map_meets_nobody() -> None:
    lone = RunFacts(name="m", dir="/m", num_workers=2)
    inherited = worker_env(Job(script="a.py", framework="jax"), 1, RUN, seat(1), {"HOME": "/h", "TF_CONFIG": "{}"})
    env = task_env(JOB, 1, lone, seat(1), inherited, 0)
    assert not [name for name in env if name.startswith(("JAX_", "OMPI_", "TF_", "MASTER_", "TORCHELASTIC_"))]
    assert (env["SHOAL_WORKER"], env["HOME"]) == ("1", "/h")


def test_what_was_written_is_read() -> None:
    run = RunFacts(name="r", dir="/r", num_workers=3, master_port=5, generation=2, is_resumed=True)
    env = worker_env(Job(script="a.py", options={"exact": "1", "x": "ü=="}), 2, run, seat(2), {})
    assert read_worker(env) == WorkerFacts(
        rank=2,
        world_size=3,
        local_rank=2,
        local_world_size=3,
        interface="lo",
        master_port=5,
        run_name="r",
        run_dir="/r",
        generation=2,
        options={"exact": "1", "x": "ü=="},
        is_resumed=True,
    )


def test_a_lone_process_is_a_run_of_one() -> None:
    assert read_worker({}) == WorkerFacts()


def test_torchrun_on_two_machines_is_understood() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    facts = read_worker({**env, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    assert (facts.rank, facts.local_rank, facts.group_rank, facts.num_nodes) == (5, 1, 1, 2)
    assert (facts.master_addr, facts.master_port, facts.run_dir, facts.control_fd) == ("node0", 29500, None, None)


def test_the_control_channel_belongs_to_one_process() -> None:
    ours = {"SHOAL_CONTROL_FD": "7", "SHOAL_CONTROL_PID": str(os.getpid())}
    assert read_worker(ours).control_fd == 7
    assert read_worker({**ours, "SHOAL_CONTROL_PID": "1"}).control_fd is None
    assert read_worker({"SHOAL_CONTROL_FD": "7"}).control_fd is None


def test_only_a_worker_of_an_elastic_run_is_told_who_takes_part() -> None:
    ours = {"SHOAL_CONTROL_FD": "7", "SHOAL_CONTROL_PID": str(os.getpid())}
    assert (read_worker(ours).world_fd, read_worker(ours).is_elastic) == (None, False)
    assert read_worker({**ours, "SHOAL_WORLD_FD": ""}).world_fd is None
    elastic = read_worker({**ours, "SHOAL_WORLD_FD": "8", "SHOAL_INCARNATION": "3"})
    assert (elastic.world_fd, elastic.is_elastic, elastic.incarnation) == (8, True, 3)
    child = read_worker({**ours, "SHOAL_WORLD_FD": "8", "SHOAL_CONTROL_PID": "1"})
    assert (child.world_fd, child.is_elastic) == (None, False)


@pytest.mark.parametrize("env", [{"RANK": "one"}, {"SHOAL_OPTIONS": "{"}, {"SHOAL_OPTIONS": "[1]"}])
def test_variables_that_make_no_sense_are_named(env: dict[str, str]) -> None:
    with pytest.raises(UserError) as caught:
        read_worker(env)
    assert next(iter(env)) in caught.value.message


def test_home_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", "/somewhere/else")
    assert shoal_home() == "/somewhere/else"
    monkeypatch.delenv("SHOAL_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert shoal_home() == "/home/me/.shoal"
