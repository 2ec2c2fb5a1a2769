"""`shoal worker`: one rank of a job that mpirun, srun or torchrun has started. All of them are the real ones."""

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from launching import SHOAL, Box, box
from slurm import NEEDS as SLURM
from slurm import slurm

from shoal.engine.place import host_names
from shoal.testing import rigs
from shoal.testing.rigs import leftovers
from shoal.testing.rigs.mpi import mpirun, mpirun_on_hosts

__all__ = ["box"]

pytestmark = pytest.mark.timeout(400)

WORKER = (*SHOAL, "worker")
HOSTS = ("root", "ip", "tc", "nsenter", "network namespaces")
EXAMPLE = Path(__file__).parents[2] / "examples" / "18_mpi_matrix.py"

SUM = """
    import os, sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "GLOO_SOCKET_IFNAME"]
    print("sum", total.item(), *[os.environ[name] for name in names], *sys.argv[1:])
    dist.barrier()
    dist.destroy_process_group()
"""

TRAIN = """
    import sys
    import torch
    import shoal

    torch.manual_seed(0)
    x = torch.randn(96, 6)
    y = x.sin().sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def loss(model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = shoal.Trainer(model, loss, optimizer, (x, y), batch_size=32, exact="exact" in sys.argv)
    losses = [trainer.step(batch) for _ in range(3) for batch in trainer]
    if trainer.rank == 0:
        print("losses", *[f"{float(found):.9f}" for found in losses])
        print("digest", trainer.digest())
    trainer.close()
"""


def losses_in(output: str) -> list[float]:
    found = re.search(r"losses ((?:[\d.]+ ?)+)", output)
    assert found, output
    return [float(number) for number in found[1].split()]


def digest_in(output: str) -> str:
    found = re.search(r"digest (\w{64})", output)
    assert found, output
    return found[1]


def test_nobody_started_it_and_it_is_a_run_of_one(box: Box) -> None:
    box.write("alone.py", "import os, sys; print(__name__, os.environ['WORLD_SIZE'], sys.argv, sys.path[0])")
    done = box.execute(*WORKER, "alone.py", "-n", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"__main__ 1 ['alone.py', '-n', '3'] {box.folder}\n"
    box.write("package/__main__.py", "import sys; print(__package__, sys.argv[1:])")
    assert box.execute(*WORKER, "-m", "package", "x").stdout == "package ['x']\n"


@pytest.mark.slow
def test_torchrun_knows_better(box: Box) -> None:
    box.write("sum.py", SUM)
    box.env["GLOO_SOCKET_IFNAME"] = "lo"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    done = box.execute(*torchrun, *WORKER, "sum.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"sum 3.0 {rank} 2 0 1 lo" for rank in range(2)]


@rigs.needs("mpirun", "mpi4py")
class TestMpirun:
    """OpenMPI, on this machine."""

    def test_a_script_for_torchrun_runs_as_it_is(self, box: Box) -> None:
        box.write("sum.py", SUM)
        done = box.execute(*mpirun(2), *WORKER, "sum.py", "--lr", "1")
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"sum 3.0 {rank} 2 0 1 lo --lr 1" for rank in range(2)]

    @pytest.mark.slow
    def test_a_trainer_has_the_losses_it_has_under_shoal_run(self, box: Box) -> None:
        box.write("train.py", TRAIN)
        ours = box.execute(*mpirun(2), *WORKER, "train.py")
        assert ours.returncode == 0, ours.stderr
        theirs = box.execute(*SHOAL, "run", "-n", "2", "train.py")
        assert losses_in(ours.stdout) == pytest.approx(losses_in(theirs.stdout), abs=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_an_exact_run_has_the_same_digest(self, box: Box, num_ranks: int) -> None:
        box.write("train.py", TRAIN)
        ours = box.execute(*mpirun(num_ranks), *WORKER, "train.py", "exact")
        assert ours.returncode == 0, ours.stderr
        theirs = box.execute(*SHOAL, "run", "-n", "2", "train.py", "exact")
        assert digest_in(ours.stdout) == digest_in(theirs.stdout)

    @pytest.mark.parametrize("how", ["raise ValueError('bad luck')", "sys.exit(7)", "sys.exit('bad luck')"])
    def test_a_failing_rank_ends_the_job(self, box: Box, how: str) -> None:
        source = f"""
            import sys, time
            from mpi4py import MPI
            if MPI.COMM_WORLD.Get_rank() == 1:
                {how}
            MPI.COMM_WORLD.Barrier()
            MPI.COMM_WORLD.Barrier()
        """
        box.write("fail.py", source)
        done = box.execute(*mpirun(3), *WORKER, "fail.py")
        assert done.returncode == (7 if "7" in how else 1), done.stderr
        assert ("bad luck" in done.stderr) == ("bad luck" in how)
        if "raise" in how:
            assert 'fail.py", line 5, in <module>' in done.stderr
            assert "engine" not in done.stderr

    def test_what_cannot_be_run_is_told_once(self, box: Box) -> None:
        box.write("train.py", "def oops(:")
        for script, told in (("trian.py", "did you mean `train.py`?"), ("train.py", "SyntaxError")):
            done = box.execute(*mpirun(3), *WORKER, script)
            assert done.returncode == 2
            assert done.stderr.count("error: ") == 1, done.stderr
            assert told in done.stderr

    def test_a_mistake_that_all_make_is_told_once(self, box: Box) -> None:
        box.write("train.py", "from shoal.spec.errors import UserError\nraise UserError('No data.', hint='get some')")
        done = box.execute(*mpirun(3), *WORKER, "train.py")
        assert done.returncode == 2
        assert done.stderr.count("error: No data.") == 1, done.stderr
        assert "rank 0, train.py:2" in done.stderr

    def test_the_error_of_the_lost_is_told_and_not_that_it_is_lost(self, box: Box) -> None:
        source = """
            import torch
            import shoal
            group = shoal.group()
            group.all_reduce(torch.ones(1)).wait()
            if group.rank == 1:
                raise ValueError("bad luck")
            group.all_reduce(torch.ones(1)).wait()
        """
        box.write("fail.py", source)
        done = box.execute(*mpirun(2), *WORKER, "fail.py")
        assert done.returncode == 1, done.stderr
        assert "ValueError: bad luck" in done.stderr
        assert "Lost rank" not in done.stderr

    def test_a_group_over_mpi_is_there_for_who_asks(self, box: Box) -> None:
        source = """
            import torch
            import shoal
            group = shoal.group(transport="mpi")
            x = torch.ones(1000, dtype=torch.bfloat16)
            group.all_reduce(x).wait()
            print(group.transport, x.unique().tolist())
            group.close()
        """
        box.write("group.py", source)
        done = box.execute(*mpirun(2), *WORKER, "group.py")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["mpi [2.0]"] * 2

    @pytest.mark.slow
    def test_a_group_over_mpi_is_refused_where_there_is_no_mpirun(self, box: Box) -> None:
        box.write("group.py", 'import shoal\nshoal.group(transport="mpi")')
        done = box.execute(*SHOAL, "run", "-n", "2", "group.py")
        assert done.returncode == 2
        assert "not ranks of one MPI job" in done.stderr
        assert "mpirun -n 4 shoal worker" in done.stderr

    def test_without_mpi4py_it_says_how_to_get_it_or_needs_a_place_to_meet(self, box: Box) -> None:
        box.write("hidden/mpi4py/__init__.py", "raise ImportError('hidden')")
        box.write("sum.py", SUM)
        box.env["PYTHONPATH"] = str(box.folder / "hidden")
        done = box.execute(*mpirun(2), *WORKER, "sum.py")
        assert done.returncode == 2
        assert done.stderr.count("error: mpi4py is not installed") == 1, done.stderr
        assert "pip install 'shoal[mpi]'" in done.stderr
        from shoal.engine.ports import ReservedPorts

        with ReservedPorts(1) as ports:
            box.env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.numbers[0])}
            done = box.execute(*mpirun(2), *WORKER, "sum.py")
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"sum 3.0 {rank} 2 0 1 lo" for rank in range(2)]

    def test_an_mpi_that_is_not_that_of_mpirun_is_noticed(self, box: Box) -> None:
        """Then each rank is alone in its world. The variables of an mpirun, without one, look the same to it."""
        box.write("sum.py", SUM)
        facts = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
        box.env |= {f"OMPI_COMM_WORLD_{name}": value for name, value in facts.items()}
        done = box.execute(*WORKER, "sum.py")
        assert done.returncode == 2
        assert "mpirun has started 2 ranks, and mpi4py sees 1" in done.stderr
        assert "MPI4PY_MPIABI" in done.stderr

    def test_an_mpi_program_runs_as_it_does_under_python(self, box: Box) -> None:
        done = box.execute(*mpirun(4), *WORKER, str(EXAMPLE))
        assert done.returncode == 0, done.stderr
        assert "by 4 ranks" in done.stdout


@rigs.needs("mpirun", "mpi4py", *HOSTS)
class TestMpirunOnHosts:
    """Two networks play two hosts; mpirun enters them without ssh."""

    def test_ranks_on_two_hosts_find_each_other(self, box: Box) -> None:
        box.write("sum.py", SUM)
        with rigs.hosts(2) as hosts:
            done = box.execute(*mpirun_on_hosts(3, hosts, box.folder), *WORKER, "sum.py")
        assert done.returncode == 0, done.stderr
        # In turns: ranks 0 and 2 are on the first host, rank 1 is on the second.
        assert sorted(done.stdout.splitlines()) == [
            "sum 6.0 0 1 1 2 eth0",
            "sum 6.0 0 2 0 2 eth0",
            "sum 6.0 1 2 0 2 eth0",
        ]

    @pytest.mark.slow
    def test_a_trainer_on_two_hosts_has_the_same_digest(self, box: Box) -> None:
        box.write("train.py", TRAIN)
        with rigs.hosts(2) as hosts:
            ours = box.execute(*mpirun_on_hosts(2, hosts, box.folder), *WORKER, "train.py", "exact")
        assert ours.returncode == 0, ours.stderr
        assert digest_in(ours.stdout) == digest_in(box.execute(*WORKER, "train.py", "exact").stdout)

    @pytest.mark.slow
    def test_a_failing_rank_ends_those_on_the_other_host(self, box: Box) -> None:
        box.write("fail.py", SUM.replace("dist.barrier()", "sys.exit(9) if dist.get_rank() else dist.barrier()"))
        with rigs.hosts(2) as hosts:
            done = box.execute(*mpirun_on_hosts(2, hosts, box.folder), *WORKER, "fail.py")
        assert done.returncode == 9, done.stderr


@pytest.mark.slow
@rigs.needs(*SLURM)
class TestSlurm:
    """A Slurm whose daemons run here for the time of a test."""

    def test_tasks_of_a_step_are_ranks_and_a_batch_script_is_none(self, box: Box) -> None:
        box.write("sum.py", SUM)
        command = " ".join(WORKER)
        box.write("batch.sh", f"#!/bin/sh\n{command} sum.py alone\nsrun -n 2 {command} sum.py together\n").chmod(
            0o755
        )
        with slurm(box.folder) as cluster:
            done = cluster.run(["srun", "-n", "2", *WORKER, "sum.py"], box.env, cwd=box.folder)
            assert done.returncode == 0, done.stderr + cluster.log()
            batch = ["sbatch", "--wait", "--ntasks", "2", "--output", "batch.out", "batch.sh"]
            assert cluster.run(batch, box.env, cwd=box.folder).returncode == 0
            wrong = cluster.run(["srun", "-n", "2", *WORKER, "smu.py"], box.env, cwd=box.folder)
        assert sorted(done.stdout.splitlines()) == [f"sum 3.0 {rank} 2 0 1 lo" for rank in range(2)]
        told = sorted((box.folder / "batch.out").read_text().splitlines())
        assert told == ["sum 1.0 0 1 0 1 lo alone", "sum 3.0 0 2 0 1 lo together", "sum 3.0 1 2 0 1 lo together"]
        assert wrong.returncode == 2
        assert wrong.stderr.count("error: There is no script") == 1, wrong.stderr

    def test_a_trainer_has_the_digest_it_has_elsewhere(self, box: Box) -> None:
        box.write("train.py", TRAIN)
        with slurm(box.folder) as cluster:
            ours = cluster.run(["srun", "-n", "2", *WORKER, "train.py", "exact"], box.env, cwd=box.folder)
        assert ours.returncode == 0, ours.stderr
        assert digest_in(ours.stdout) == digest_in(box.execute(*WORKER, "train.py", "exact").stdout)

    def test_a_failing_task_fails_the_step(self, box: Box) -> None:
        box.write("fail.py", SUM.replace("dist.barrier()", "sys.exit(9) if dist.get_rank() else dist.barrier()"))
        with slurm(box.folder) as cluster:
            done = cluster.run(
                ["srun", "--kill-on-bad-exit=1", "-n", "2", *WORKER, "fail.py"], box.env, cwd=box.folder
            )
        assert done.returncode != 0
        assert "task 1: Exited with exit code 9" in done.stderr, done.stderr

    @rigs.needs(*HOSTS)
    def test_nodes_find_each_other_by_name(self, box: Box) -> None:
        box.write("sum.py", SUM)
        with rigs.hosts(2) as hosts, slurm(box.folder, hosts) as cluster:
            done = cluster.run(["srun", "-N", "2", "-n", "3", *WORKER, "sum.py"], box.env, cwd=box.folder)
            assert done.returncode == 0, done.stderr + cluster.log()
        assert sorted(done.stdout.splitlines()) == [
            "sum 6.0 0 1 1 2 eth0",
            "sum 6.0 0 2 0 2 eth0",
            "sum 6.0 1 2 0 2 eth0",
        ]

    def test_names_of_nodes_are_those_that_slurm_makes_of_them(self, box: Box) -> None:
        lists = ("n[1-3,7]", "a[5,1-3],b[1-2]", "node[099-101],x", "rack[2-3]n[07,09]")
        with slurm(box.folder) as cluster:
            for nodes in lists:
                theirs = cluster.run(["scontrol", "show", "hostnames", nodes], box.env).stdout.split()
                assert host_names(nodes) == theirs

    @pytest.mark.timeout(900)
    @rigs.needs("mpirun", *HOSTS)
    def test_a_launcher_in_an_allocation_finds_its_hosts_and_goes_on_without_one(self, box: Box) -> None:
        box.write("sum.py", SUM)
        run = " ".join(
            (*SHOAL, "run", "--engine", "mpi", "-o", "engine.wait=60", "-o", "transport=tcp", "--threads", "1")
        )
        jobs = str(Path(__file__).with_name("elastic_jobs.py"))
        given = "--env ELASTIC_PAUSE=0.2 --env ELASTIC_WANTED=2"
        script = f"#!/bin/sh\n{run} --name sum sum.py\n{run} -n 1:2 {given} --name r {jobs} long\n"
        box.write("batch.sh", script).chmod(0o755)
        with rigs.hosts(2) as hosts, slurm(box.folder, hosts) as cluster:
            batch = ["sbatch", "-N", "2", "--ntasks-per-node", "1", "--no-kill", "--output", "batch.out", "batch.sh"]
            assert cluster.run(batch, box.env, cwd=box.folder).returncode == 0

            def told() -> str:
                path = box.folder / "batch.out"
                return path.read_text() if path.exists() else ""

            journal = box.home / "runs" / "r" / "journal.jsonl"

            def worlds() -> list[int]:
                lines = journal.read_text().splitlines() if journal.exists() else []
                with contextlib.suppress(ValueError):  # the last line may be half there
                    events = [json.loads(line) for line in lines]
                    return [len(event["data"]["members"]) for event in events if event["kind"] == "world"]
                return []

            box.wait_for(lambda: worlds()[-1:] == [2] or "error:" in told(), 300)
            assert "error:" not in told(), told() + cluster.log()
            box.wait_for(lambda: "checkpoint_saved" in journal.read_text(), 120)
            for pid in pids_on(hosts, 1):
                os.kill(pid, signal.SIGKILL)
            box.wait_for(lambda: '"run_ended"' in journal.read_text(), 300)
        assert worlds()[-1] == 1
        folder = box.home / "runs" / "sum" / "logs"
        # Before it torch may say that it knows no name for an address.
        assert sorted((folder / f"{rank}.log").read_text().splitlines()[-1] for rank in range(2)) == [
            "sum 3.0 0 1 0 2 eth0",
            "sum 3.0 0 1 1 2 eth0",
        ]
        assert "lost shoal1" in told()
        ending = re.search(r"^ended (.*)$", (box.home / "runs" / "r" / "logs" / "0.log").read_text(), re.MULTILINE)
        assert ending
        alone = re.search(
            r"^ended (.*)$", box.execute(sys.executable, jobs, "long", timeout=300).stdout, re.MULTILINE
        )
        assert alone
        assert ending[1] == alone[1]


def pids_on(hosts: rigs.Hosts, host: int) -> list[int]:
    """The processes that have the network of this host."""
    network = os.stat(leftovers.NAMESPACES / hosts.names[host]).st_ino
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}/ns/net").st_ino == network:
                found.append(int(name))
    return found
