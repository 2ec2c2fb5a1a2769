"""A cluster of machines by join code: the door over loopback, and real Ray on three hosts."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from machines import NEEDS_HOSTS, VERB, Machines, machines, wait_until

from shoal.cluster import head
from shoal.cluster.certificates import as_der, make_authority, make_request, sign_request
from shoal.cluster.codes import Code, fingerprint_of
from shoal.cluster.door import Door
from shoal.cluster.files import make_folder, read_private, write_cluster, write_private
from shoal.cluster.guest import Visit, hello
from shoal.cluster.invitations import OPEN_SECONDS, invite, read_invitations
from shoal.cluster.ports import Ports
from shoal.cluster.ray_node import temp_dir_for
from shoal.cluster.reach import check_free, is_free, listening, try_ports, who_listens
from shoal.cluster.wire import Lines, guest_tls, server_context
from shoal.engine.clusters import HEAD, Cluster
from shoal.spec.errors import UserError
from shoal.testing.rigs.machine import call

__all__ = ["machines"]

HERE = "127.0.0.1"


class OpenDoor:
    """The door of a head that has no Ray, in a thread of this process."""

    def __init__(self, folder: str) -> None:
        make_folder(folder)
        self.cluster = Cluster(
            name="anna",
            role=HEAD,
            address=f"{HERE}:7481",
            node_address=HERE,
            port=7480,
            has_tls=True,
            folder=folder,
            temp_dir=temp_dir_for(folder),
        )
        head.make_secrets(self.cluster, is_new=True)
        write_cluster(self.cluster)
        self.code = invite(folder, as_der(read_private(folder, "node.pem")))
        self.listener = socket.create_server((HERE, 0))
        self.port = self.listener.getsockname()[1]
        self._thread = threading.Thread(target=Door(self.cluster, self.listener).stand_open)
        self._thread.start()

    def expire(self) -> None:
        """What ten minutes do to all invitations."""
        late = [replace(each, expires=each.expires - OPEN_SECONDS) for each in read_invitations(self.cluster.folder)]
        facts = [{"secret": each.secret, "expires": each.expires, "used_by": each.used_by} for each in late]
        write_private(self.cluster.folder, "invitations.json", json.dumps(facts))

    def close(self) -> None:
        self.expire()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the door ends by itself with the last invitation"
        self.listener.close()


@pytest.fixture
def door(tmp_path) -> Iterator[OpenDoor]:
    opened = OpenDoor(str(tmp_path / "cluster"))
    yield opened
    opened.close()


def test_whoever_brings_the_code_gets_what_it_needs(door):
    with Visit(HERE, door.port, door.code) as visit:
        facts, ahead_seconds = hello(visit)
        assert facts["name"] == "anna"
        assert facts["versions"]["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
        assert abs(ahead_seconds) < 60
        key, request = make_request("bert")
        given = visit.ask("admit", request=request.decode())
    assert given["token"] == read_private(door.cluster.folder, "token").decode()
    assert given["ca"] == read_private(door.cluster.folder, "ca.pem").decode()
    assert b"PRIVATE KEY" in key
    assert "PRIVATE KEY" not in json.dumps(given)


def test_a_code_lets_a_machine_in_once(door):
    _, request = make_request("bert")
    with Visit(HERE, door.port, door.code) as visit:
        visit.ask("admit", request=request.decode())
    with Visit(HERE, door.port, door.code) as visit, pytest.raises(UserError, match="used already"):
        visit.ask("hello")


def test_a_wrong_code_is_refused_and_told_nothing(door):
    wrong = Code(door.code.fingerprint, "0" * 15)
    with Visit(HERE, door.port, wrong) as visit, pytest.raises(UserError, match="The code is wrong"):
        visit.ask("hello")
    with socket.create_connection((HERE, door.port), 20) as plain, guest_tls(plain) as tls:
        lines = Lines(tls)
        lines.send(json.dumps({"verb": "hello"}), "no proof")
        assert lines.receive() == ("", "")
        assert lines.receive() is None


def test_an_expired_code_is_told_so(door):
    # A second invitation, still open, keeps somebody at the door.
    late = door.code
    door.expire()
    invite(door.cluster.folder, as_der(read_private(door.cluster.folder, "node.pem")))
    with Visit(HERE, door.port, late) as visit, pytest.raises(UserError, match="expired"):
        visit.ask("hello")


def test_another_machine_is_known_by_its_certificate(door):
    other = Code("0000" if door.code.fingerprint != "0000" else "1111", door.code.secret)
    with pytest.raises(UserError, match="not the machine that made this code"):
        Visit(HERE, door.port, other)


@contextlib.contextmanager
def somebody_in_between(folder: str, port: int) -> Iterator[tuple[int, bytes]]:
    """Speaks TLS with both sides and hands on every line. Yields its port and its certificate."""
    ca, ca_key = make_authority()
    key, request = make_request("mallory")
    write_private(folder, "evil.pem", sign_request(request, HERE, ca, ca_key))
    write_private(folder, "evil.key", key)
    context = server_context(os.path.join(folder, "evil.pem"), os.path.join(folder, "evil.key"))

    def relay(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = listener.accept()
            with context.wrap_socket(accepted, server_side=True) as guest:
                plain = socket.create_connection((HERE, port), 20)
                with guest_tls(plain) as to_door:
                    victim, door_lines = Lines(guest), Lines(to_door)
                    while (said := victim.receive()) is not None:
                        door_lines.send(*said)
                        answer = door_lines.receive()
                        victim.send(*(answer or ("", "")))

    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=relay, args=(listener,))
        thread.start()
        yield listener.getsockname()[1], as_der(read_private(folder, "evil.pem"))
        thread.join(40)
        assert not thread.is_alive()


def test_somebody_in_between_takes_no_part(door):
    with (
        somebody_in_between(door.cluster.folder, door.port) as (port, _),
        pytest.raises(UserError, match="somebody sits in between"),
    ):
        Visit(HERE, port, door.code)


def test_somebody_in_between_with_a_certificate_that_looks_alike_takes_no_part(door):
    """The letters of a certificate in a code are few, and could be forged with patience. Proofs hold all of it."""
    with somebody_in_between(door.cluster.folder, door.port) as (port, certificate):
        alike = Code(fingerprint_of(certificate), door.code.secret)
        with Visit(HERE, port, alike) as visit, pytest.raises(UserError, match="The code is wrong"):
            visit.ask("admit", request="x")


@pytest.mark.parametrize("nonsense", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 300])
def test_nonsense_at_the_door_harms_nobody(door, nonsense):
    with socket.create_connection((HERE, door.port), 20) as call_:
        call_.sendall(nonsense)
    with Visit(HERE, door.port, door.code) as visit:
        assert visit.ask("hello")["name"] == "anna"


def test_requests_that_cannot_be_read_are_told(door):
    with Visit(HERE, door.port, door.code) as visit:
        for verb, facts in (("surprise", {}), ("admit", {}), ("call_back", {"ports": ["x"]})):
            with pytest.raises(UserError, match="cannot be read"):
                visit.ask(verb, **facts)
        with pytest.raises(UserError, match="not one of ours"):
            visit.ask("admit", request="nonsense")


def test_nobody_at_the_door_is_told(tmp_path):
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UserError, match="refuses connections") as told:
        Visit(HERE, port, Code("0000", "0" * 15))
    assert "--invite" in told.value.hint


def test_a_taken_port_is_told_with_who_has_it():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port)
        assert f"pid {os.getpid()}" in who_listens(port)
        with pytest.raises(UserError, match=f"in use on this machine: {port}") as told:
            check_free({port: "Ray's head"}, "end it")
        assert f"{port} (Ray's head) by" in told.value.why
        assert str(os.getpid()) in told.value.why


def test_ports_are_tried_at_once():
    with listening([0, 0]) as ports:
        assert try_ports(HERE, ports) == {}
    failed = try_ports(HERE, ports)
    assert set(failed) == set(ports)
    assert all("refused" in what for what in failed.values())


# From here on: three hosts, and Ray.

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "elastic_jobs.py")

SPREAD = """
import json, os, sys
from shoal.engine.clusters import find_cluster
cluster = find_cluster()
os.environ.update(cluster.env)
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
ray.init(address=cluster.address, _node_ip_address=cluster.node_address, log_to_driver=False, logging_level="ERROR")
count = int(sys.argv[1])
group = placement_group([{"CPU": 1}] * count, strategy="STRICT_SPREAD")
ray.get(group.ready(), timeout=90)

@ray.remote(num_cpus=1)
def where():
    return ray.util.get_node_ip_address(), os.environ["RAY_USE_TLS"], os.environ.get("RAY_TLS_SERVER_KEY", "")

places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(count)]
print(json.dumps(ray.get([where.options(scheduling_strategy=place).remote() for place in places], timeout=90)))
"""

HOLD = """
import os, sys, time
from shoal.engine.clusters import find_cluster
cluster = find_cluster()
os.environ.update(cluster.env)
import ray
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
hold = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(lambda seconds: time.sleep(seconds))
ray.get(hold.remote(0), timeout=90)
print("held", flush=True)
busy = [hold.remote(600) for _ in range(2)]
time.sleep(600)
"""


@contextlib.contextmanager
def blocked(machines: Machines, host: int, direction: str, port: int) -> Iterator[None]:
    """A firewall on a host that drops what goes to one port, without a word."""
    device = ["-n", machines.hosts.names[host], "filter"]
    place = ["dev", machines.hosts.interface, direction, "prio", "7"]
    # The port that a TCP packet goes to is at byte 36: 14 of Ethernet, 20 of IP, then the port it comes from.
    program = f"4,40 0 0 36,21 0 1 {port},6 0 0 2,6 0 0 0"
    call("tc", *device, "add", *place, "bpf", "direct-action", "bytecode", program)
    try:
        yield
    finally:
        call("tc", *device, "delete", *place)


class TestThreeMachines:
    pytestmark = NEEDS_HOSTS

    def test_up_join_work_and_down(self, machines):
        code = machines.up()
        secrets = {"token", "ca.key", "node.key", "cluster.json", "invitations.json"}
        modes = {os.stat(os.path.join(machines.folder(0), name)).st_mode & 0o777 for name in secrets}
        assert modes == {0o600}
        machines.join_all(code, (1, 2))
        assert not os.path.exists(os.path.join(machines.folder(1), "ca.key"))
        nodes = machines.shoal(2, "nodes")["nodes"]
        assert [(node["name"], node["address"], node["is_alive"]) for node in nodes] == [
            ("first", "10.77.0.1", True),
            ("host1", "10.77.0.2", True),
            ("host2", "10.77.0.3", True),
        ]
        assert nodes[1]["labels"] == {"number": "1"}
        assert nodes[1]["cores"] == nodes[1]["free_cores"] > 0
        alone = machines.python(1, VERB, "run", "-n", "9", "-m", "this")
        assert "9 workers share" in alone.stderr
        assert "`--engine ray` has them on all machines of the cluster of 10.77.0.1" in alone.stderr
        spread = machines.python(1, SPREAD, "3")
        assert spread.returncode == 0, spread.stderr
        found = sorted(json.loads(spread.stdout.splitlines()[-1]))
        assert [(address, has_tls) for address, has_tls, _ in found] == [(f"10.77.0.{i}", "1") for i in (1, 2, 3)]
        assert [os.path.dirname(key) for *_, key in found] == [machines.folder(host) for host in (0, 1, 2)]
        assert machines.shoal(0, "down")["untold"] == []
        wait_until(lambda: not any(os.path.exists(machines.folder(host)) for host in (0, 1, 2)))

    @pytest.mark.slow
    def test_codes_and_twice(self, machines):
        code = machines.up()
        assert machines.shoal(0, "up", "--cluster")["status"] == "up"
        assert "The code is wrong" in machines.refused(1, "join", "10.77.0.1", "--code", wrong(code))
        machines.join_all(code, (1,))
        assert machines.shoal(1, "join", "10.77.0.1", "--code", code)["status"] == "joined already"
        assert machines.shoal(1, "leave")["status"] == "left"
        assert machines.names() == ["first"]
        assert machines.names(is_alive=False) == []
        assert "used already" in machines.refused(1, "join", "10.77.0.1", "--code", code)
        again = machines.shoal(0, "up", "--cluster", "--invite")["code"]
        machines.join_all(again, (1, 2))
        assert machines.names() == ["first", "host1", "host2"]
        machines.shoal(1, "leave")
        assert machines.names() == ["first", "host2"]

    @pytest.mark.slow
    def test_what_is_in_the_way_is_named(self, machines):
        code = machines.up()
        ports = Ports()
        join = ("join", "10.77.0.1", "--code", code)
        with blocked(machines, 1, "ingress", ports.object_manager):
            told = machines.refused(1, *join)
            assert f"from 10.77.0.1 to 10.77.0.2 port {ports.object_manager} (Ray's object manager)" in told
        with blocked(machines, 1, "egress", ports.gcs):
            told = machines.refused(1, *join)
            assert f"from 10.77.0.2 to 10.77.0.1 port {ports.gcs} (Ray's head)" in told
        holder = f"import socket, time; s = socket.create_server(('', {ports.node_manager})); print(flush=True)"
        taken = machines.hosts.start(
            1, [sys.executable, "-c", f"{holder}; time.sleep(600)"], stdout=subprocess.PIPE, text=True
        )
        assert taken.stdout is not None
        taken.stdout.readline()
        told = machines.refused(1, *join)
        assert f"{ports.node_manager} (Ray's node manager) by python" in told
        assert f"pid {taken.pid}" in told
        taken.kill()
        taken.communicate(timeout=20)
        machines.hosts.partition(0)
        told = machines.refused(1, *join)
        assert "does not answer" in told or "cannot be reached" in told
        machines.hosts.heal(0)
        # None of this has used the code.
        machines.join_all(code, (1,))
        with blocked(machines, 1, "ingress", ports.object_manager):
            warnings = machines.shoal(2, "join", "10.77.0.1", "--code", code)["warnings"]
        assert warnings == [f"10.77.0.2, which came in before, does not answer at port {ports.object_manager}"]

    @pytest.mark.slow
    def test_machines_that_are_killed_come_back(self, machines):
        code = machines.up()
        machines.join_all(code, (1, 2))
        machines.kill(1)
        wait_until(lambda: machines.names(is_alive=False) == ["host1"])
        assert machines.shoal(1, "join", "10.77.0.1")["status"] == "joined"
        assert machines.names() == ["first", "host1", "host2"]
        # Members go first: on one machine with one list of processes, Ray would take them for a head that runs.
        for host in (2, 1, 0):
            machines.kill(host)
        wait_until(lambda: not any(machines.pids(host) for host in (0, 1, 2)))
        assert "refuses connections" in machines.refused(1, "nodes")
        told = machines.python(0, "from shoal.engine.clusters import find_cluster; find_cluster()")
        assert "Ray does not run here" in told.stderr
        assert machines.shoal(0, "up", "--cluster")["name"] == "first"
        assert machines.shoal(1, "join", "10.77.0.1")["status"] == "joined"
        assert machines.names() == ["first", "host1"]

    @pytest.mark.slow
    def test_without_tls(self, machines):
        code = machines.up("--no-tls", "--port", "9300")
        assert machines.shoal(1, "join", "10.77.0.1:9300", "--code", code)["has_tls"] is False
        spread = machines.python(1, SPREAD, "2")
        assert spread.returncode == 0, spread.stderr
        found = sorted(json.loads(spread.stdout.splitlines()[-1]))
        assert [(address, has_tls) for address, has_tls, _ in found] == [("10.77.0.1", "0"), ("10.77.0.2", "0")]

    @pytest.mark.slow
    def test_what_is_running_is_not_ended_by_mistake(self, machines):
        code = machines.up()
        machines.join_all(code, (1,))
        holding = machines.hosts.start(
            0, [sys.executable, "-c", HOLD], env=machines.env(0), stdout=subprocess.PIPE, text=True
        )
        assert holding.stdout is not None
        assert "held" in holding.stdout.readline()
        wait_until(lambda: all(node["is_busy"] for node in machines.shoal(0, "nodes")["nodes"]))
        assert "Something is running" in machines.refused(1, "leave")
        assert "Something is running" in machines.refused(0, "down")
        assert machines.shoal(1, "leave", "--force")["status"] == "left"
        assert machines.shoal(0, "down", "--force")["status"] == "down"
        holding.kill()
        holding.communicate(timeout=20)

    @pytest.mark.slow
    def test_a_training_over_three_machines_loses_one(self, machines, tmp_path):
        clean = subprocess.run(
            [sys.executable, JOBS, "long"], capture_output=True, text=True, timeout=100, check=True
        )
        machines.join_all(machines.up(), (1, 2))
        cores = str(machines.shoal(0, "nodes")["nodes"][0]["cores"])
        run = tmp_path / "run"
        # One worker has all cores of a machine, so that there is one on each.
        options = ["-o", f"engine.cpus={cores}", "-o", "transport=tcp", "--env", "ELASTIC_PAUSE=0.1"]
        command = [sys.executable, "-m", "shoal", "run", "-n", "2:3", "--engine", "ray", *options]
        command += ["--log-dir", str(run), JOBS, "long"]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        launcher = machines.hosts.start(0, command, env=machines.env(0), **out)
        journal = run / "journal.jsonl"
        wait_until(
            lambda: launcher.poll() is not None or (journal.exists() and '"kind":"world"' in journal.read_text())
        )
        time.sleep(3.0)
        machines.kill(2)
        shown, told = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, told
        assert "lost 10.77.0.3" in told
        assert '"members":["0.0","1.0","2.0"]' in journal.read_text().replace(" ", "")
        ending = clean.stdout.split("ended ", 1)[1].splitlines()[0]
        assert ending in shown

    @pytest.mark.slow
    def test_a_training_goes_on_while_a_cable_is_cut_and_takes_the_machine_back(self, machines, tmp_path):
        """Packets to and from one machine vanish without a word. Ray, too, gives it up, and lets it in again."""
        clean = subprocess.run(
            [sys.executable, JOBS, "long"], capture_output=True, text=True, timeout=100, check=True
        )
        machines.join_all(machines.up(), (1, 2))
        cores = str(machines.shoal(0, "nodes")["nodes"][0]["cores"])
        run, hurry = tmp_path / "run", tmp_path / "hurry"
        options = ["-o", f"engine.cpus={cores}", "-o", "transport=tcp"]
        options += ["--env", "ELASTIC_PAUSE=1.5", "--env", f"ELASTIC_HURRY={hurry}"]
        command = [sys.executable, "-m", "shoal", "run", "-n", "2:3", "--engine", "ray", *options]
        command += ["--log-dir", str(run), JOBS, "long"]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        launcher = machines.hosts.start(0, command, env=machines.env(0), **out)

        def events(kind):
            lines = (run / "journal.jsonl").read_text().splitlines() if (run / "journal.jsonl").exists() else []
            return [event for line in lines if (event := json.loads(line))["kind"] == kind]

        def wait_for(condition, seconds=150.0):
            wait_until(lambda: launcher.poll() is not None or condition(), seconds)
            assert launcher.poll() is None, launcher.communicate()

        wait_for(lambda: events("checkpoint_saved"))
        assert len(events("world")[-1]["data"]["members"]) == 3
        machines.hosts.partition(2)
        wait_for(lambda: len(events("world")[-1]["data"]["members"]) == 2)
        num_saved = len(events("checkpoint_saved"))
        wait_for(lambda: len(events("checkpoint_saved")) > num_saved)
        wait_for(lambda: machines.names(is_alive=False) == ["host2"])
        machines.hosts.heal(2)
        # Ray there ends when it hears that it was given up.
        again = [sys.executable, "-c", VERB, "join", "10.77.0.1", "--json"]
        told = {"env": machines.env(2), "capture_output": True, "text": True, "timeout": 200, "check": False}
        wait_for(lambda: '"joined"' in machines.hosts.run(2, again, **told).stdout, 200)
        wait_for(lambda: len(events("world")[-1]["data"]["members"]) == 3)
        hurry.touch()
        shown, said = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, said
        assert "lost 10.77.0.3" in said
        assert clean.stdout.split("ended ", 1)[1].splitlines()[0] in shown

    @pytest.mark.slow
    def test_a_run_is_submitted_from_one_machine_to_all(self, machines, tmp_path):
        """Each machine has a copy of the folder in a place of its own; token and TLS hold for all that is said."""
        machines.join_all(machines.up(), (1, 2))
        cores = str(machines.shoal(0, "nodes")["nodes"][0]["cores"])
        work = tmp_path / "work"
        work.mkdir()
        (work / "helper.py").write_text("def where():\n    import os\n    return os.getcwd()\n")
        (work / "train.py").write_text(
            "import helper, shoal, torch\ntorch.manual_seed(0)\n"
            "data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))\n"
            "model = torch.nn.Linear(4, 1)\n"
            "loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])\n"
            "trainer = shoal.Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=16)\n"
            "trainer.fit(epochs=2)\nprint('trained in', helper.where())\n"
        )
        options = ["-n", "3", "-o", f"engine.cpus={cores}", "--name", "far", "--json"]
        command = [sys.executable, "-m", "shoal", "submit", *options, "train.py"]
        asked = {"capture_output": True, "text": True, "timeout": 200, "check": False}
        given = machines.hosts.run(1, command, cwd=work, env=machines.env(1), **asked)
        assert given.returncode == 0, given.stderr
        assert json.loads(given.stdout)["folder"].startswith(os.path.dirname(machines.folder(0)))
        follow = [sys.executable, "-m", "shoal", "logs", "far", "--cluster", "--follow"]
        followed = machines.hosts.run(2, follow, env=machines.env(2), **asked)
        assert followed.returncode == 0, followed.stdout + followed.stderr
        folders = {line.rpartition(" ")[2] for line in followed.stdout.splitlines() if "trained in" in line}
        assert len(folders) == 3, followed.stdout
        (row,) = machines.shoal(2, "ps", "--cluster")
        assert (row["run"], row["status"], row["num_workers"], row["step"]) == ("far", "finished", 3, 8)

    @pytest.mark.slow
    def test_links_are_measured_and_remembered(self, machines):
        code = machines.up()
        machines.join_all(code, (1,))
        machines.join_all(code, (2,))
        assert machines.shoal(0, "nodes")["links"] is None
        machines.hosts.shape(2, rate_mbit=20)
        measured = machines.shoal(0, "nodes", "--measure")["links"]
        rates = {(link["first"], link["second"]): link for link in measured["links"]}
        assert {frozenset(pair) for pair in rates} == {
            frozenset(pair) for pair in (("first", "host1"), ("first", "host2"), ("host1", "host2"))
        }
        assert all(link["latency_seconds"] > 0 for link in rates.values())
        assert "host2" in measured["slowest"]
        mbit = {pair: min(link["forward"], link["backward"]) * 8 / 1e6 for pair, link in rates.items()}
        slow = [rate for pair, rate in mbit.items() if "host2" in pair]
        (other,) = [rate for pair, rate in mbit.items() if "host2" not in pair]
        assert all(5 < rate < 30 for rate in slow), rates
        assert other > max(slow)
        assert machines.shoal(0, "nodes")["links"] == measured
        said = machines.python(0, VERB, "nodes").stdout
        assert "ago: the slowest link is between" in said


def wrong(code: str) -> str:
    """A code for the same head, well typed, that nobody made."""
    return str(Code(code[:4], "0" * 15))
