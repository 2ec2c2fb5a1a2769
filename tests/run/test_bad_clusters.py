"""What is wrong with an engine or a cluster is told in a few lines, and soon. docs/errors.md has a row for each."""

import contextlib
import importlib.util
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import SHOAL, Box, box, mpirun_without_mpi

from shoal.testing import rigs
from shoal.testing.rigs.machine import LACKS

__all__ = ["box"]

pytestmark = pytest.mark.timeout(240)
DOCS = Path(__file__).parents[2] / "docs" / "errors.md"
SOON = 30.0
"""Ten seconds are promised. A busy machine takes longer; what waits for something takes minutes."""
AGENT = "from shoal.engine import agent"


def hide(package: str) -> Callable[[Box], None]:
    """Let this package not be there."""

    def hide_it(box: Box) -> None:
        box.write(f"without/{package}/__init__.py", "raise ImportError")
        box.env["PYTHONPATH"] = str(box.folder / "without")

    return hide_it


def no_programs(box: Box) -> None:
    (box.folder / "bin").mkdir()
    box.env["PATH"] = str(box.folder / "bin")


def lonely(box: Box) -> None:
    """Agents that look for their launcher where nobody is."""
    cut = "true = agent.Invitation; agent.Invitation = lambda **facts: true(**{**facts, 'port': 1})"
    mpirun_without_mpi(box, f"{AGENT}; {cut}")


def elsewhere(box: Box) -> None:
    """Agents on a machine that does not have the folder of the run."""
    empty = box.folder / "empty"
    empty.mkdir()
    moved = f"agent.move = lambda path, moved: path.replace('{box.folder}', '{empty}')"
    mpirun_without_mpi(box, f"{AGENT}; {moved}")


def other_python(box: Box) -> None:
    mpirun_without_mpi(box, f"{AGENT}; agent.versions = lambda known=agent.versions: dict(known(), python='3.9')")


def gone_cluster(box: Box) -> None:
    """What a shell still has of a cluster that has ended."""
    box.env["RAY_ADDRESS"] = "127.0.0.1:1"


def plain_agents(box: Box) -> None:
    mpirun_without_mpi(box, AGENT)


def nothing(box: Box) -> None: ...


MISTAKES = {
    "no ray": (hide("ray"), "--engine ray", "Ray is not installed.", "run `pip install 'shoal[ray]'`"),
    "no spark": (hide("pyspark"), "--engine spark", "Spark is not installed.", "run `pip install 'shoal[spark]'`"),
    "no mpirun": (no_programs, "--engine mpi", "mpirun was not found.", "install OpenMPI"),
    "no such engine": (nothing, "--engine rya", "There is no engine 'rya'.", "use one of: local, "),
    "no ray there": (
        nothing,
        "--engine ray --address 127.0.0.1:1",
        "There is no Ray cluster at 127.0.0.1:1 for us.",
        "start one with `shoal up --cluster`",
    ),
    "no ray any more": (
        gone_cluster,
        "--engine ray",
        "There is no Ray cluster at 127.0.0.1:1 for us.",
        "start one with `shoal up --cluster`",
    ),
    "no spark there": (
        nothing,
        "--engine spark --master spark://127.0.0.1:1",
        "No Spark master answers at spark://127.0.0.1:1.",
        "check the address in the log of the master",
    ),
    "no such host": (
        plain_agents,
        "--engine mpi --hosts nowhere.invalid:2",
        "There is no way to the host 'nowhere.invalid'.",
        "check its name",
    ),
    "too few slots": (
        plain_agents,
        "--engine mpi --hosts localhost:1",
        "The hosts have 1 slot, and 2 workers are needed.",
        "name more hosts, or more slots of each",
    ),
    "launcher out of reach": (
        lonely,
        "--engine mpi --hosts localhost:2",
        "No agent could be started on localhost.",
        "check that it is reached without a password",
    ),
    "another python": (other_python, "--engine mpi --hosts localhost:2", None, "install python "),
    "script is not there": (elsewhere, "--engine mpi --hosts localhost:2", None, "keep the script and its data in"),
}


def lacks(engine: str) -> bool:
    return importlib.util.find_spec({"spark": "pyspark"}.get(engine, engine)) is None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_soon(box: Box, name: str) -> None:
    prepare, args, error, do = MISTAKES[name]
    if name in ("no ray there", "no ray any more", "no spark there") and lacks(name.split()[1]):
        pytest.skip(f"{LACKS} {name.split()[1]}")
    box.write("train.py", "print('never')")
    prepare(box)
    began = time.monotonic()
    done = box.run("run", "-n", "2", *args.split(), "train.py")
    seconds = time.monotonic() - began
    assert done.returncode == 2, done.stderr
    told = done.stderr[done.stderr.index("error: ") :].splitlines()
    if error is not None:
        assert told[0] == f"error: {error}"
    assert f"   do: {do}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "never" not in done.stdout
    assert seconds < SOON
    if name == "launcher out of reach":
        assert re.search(r"why: error: localhost cannot reach the launcher at 127\.0\.0\.1:1\.", done.stderr)
        assert "let TCP connections from there to 127.0.0.1, port 1, through the firewall" in done.stderr
    if name == "another python":
        assert told[0].startswith("error: localhost has python 3.9, and the launcher has 3.")
    if name == "script is not there":
        assert told[0].startswith("error: Worker 0 could not be started on ")
        assert told[1] == f"  why: there is no script {box.folder}/empty/train.py on that machine"


def test_a_machine_without_the_data_is_named(box: Box) -> None:
    box.write("data.txt", "all there")
    box.write("train.py", "print(open('data.txt').read())")
    box.write("empty/train.py", "print(open('data.txt').read())")
    moved = f"agent.move = lambda path, moved: path.replace('{box.folder}', '{box.folder / 'empty'}')"
    mpirun_without_mpi(box, f"{AGENT}; {moved}")
    done = box.run("run", "-n", "2", "--engine", "mpi", "--hosts", "localhost:2", "train.py")
    assert done.returncode == 1, done.stderr
    assert "No such file or directory: 'data.txt'" in done.stderr
    assert re.search(r"do: rank [01] is on localhost \(127\.0\.0\.1\): keep data in a folder that all", done.stderr)


@rigs.needs("memory cgroups")
def test_a_machine_without_enough_memory_is_named(box: Box) -> None:
    """The machine is this one, with little memory for the agent and all that it starts."""
    box.write("train.py", "print('never')")
    plain_agents(box)
    with rigs.memory_limit(500 << 20) as group:
        command = [*SHOAL, "run", "-n", "2", "--engine", "mpi", "--hosts", "localhost:2", "train.py"]
        done = box.execute(*group.command(command))
    assert done.returncode == 2, done.stderr
    assert "error: 2 workers do not fit into the memory of localhost.\n" in done.stderr
    assert re.search(r"why: each takes about 350 MB and \d+ MB are available there\n", done.stderr)
    assert "   do: start fewer workers, or spread them over more machines\n" in done.stderr
    assert "never" not in done.stdout


@contextlib.contextmanager
def stranger(answer: bytes) -> Iterator[int]:
    """Something that listens, and is not what is looked for. Without an answer it says nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    call, _ = server.accept()
                    held.append(call)
                    if answer:
                        call.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for call in held:
                call.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@pytest.mark.parametrize(("engine", "option"), [("ray", "--address {}"), ("spark", "--master spark://{}")])
def test_a_stranger_at_the_address_is_not_waited_for(box: Box, engine: str, option: str, answer: bytes) -> None:
    if lacks(engine):
        pytest.skip(f"{LACKS} {engine}")
    box.write("train.py", "print('never')")
    with stranger(answer) as port:
        began = time.monotonic()
        done = box.run("run", "-n", "2", "--engine", engine, *option.format(f"127.0.0.1:{port}").split(), "train.py")
        seconds = time.monotonic() - began
    assert done.returncode == 2, done.stderr
    assert re.match(r"error: (There is no Ray cluster|No Spark master answers) at ", done.stderr)
    assert str(port) in done.stderr.split("why: ")[1].splitlines()[0]
    assert seconds < SOON


# Where Ray keeps what its head was started with: what a head of another version would have written there.
ANOTHER_VERSION = """
import json, sys
from shoal.engine.ray import import_ray
import_ray()
from ray._raylet import GcsClient
head = GcsClient(address=sys.argv[1])
place = b"CLUSTER_METADATA", b"cluster"
facts = json.loads(head.internal_kv_get(*place))
head.internal_kv_put(place[0], json.dumps(facts | {"ray_version": "2.9.0"}).encode(), True, place[1])
"""


@pytest.mark.slow
@rigs.needs("ray")
def test_a_cluster_with_another_ray_is_refused_with_both_versions(box: Box) -> None:
    from shoal.testing.rigs.rays import ray_cluster

    box.write("train.py", "print('never')")
    with ray_cluster(1) as cluster:
        box.env |= cluster.env
        changed = box.execute(sys.executable, "-c", ANOTHER_VERSION, cluster.address)
        assert changed.returncode == 0, changed.stderr
        done = box.run("run", "--engine", "ray", "--address", cluster.address, "train.py")
    assert done.returncode == 2, done.stderr
    assert f"error: The Ray cluster at {cluster.address} cannot be used from here.\n" in done.stderr
    assert re.search(r"why: Version mismatch: .* Ray: 2\.9\.0 .* Ray: 2\.\d\d", done.stderr)
    assert "   do: install the same Ray and Python on both sides\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_data_that_is_not_there_is_told_with_the_machine(box: Box) -> None:
    pytest.importorskip("pyarrow")
    source = """
        import torch, shoal
        model = torch.nn.Linear(1, 1)
        loss = lambda model, batch: model(batch["x"][:, None]).square().mean()
        shoal.Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), "rows.parquet", batch_size=8)
    """
    box.write("train.py", source)
    plain_agents(box)
    done = box.run("run", "--engine", "mpi", "--hosts", "localhost:2", "train.py")
    assert done.returncode == 2
    assert "error: There is no file rows.parquet\n" in done.stderr
    assert f"why: looked in {box.folder} on {socket.gethostname()}\n" in done.stderr


def test_every_mistake_has_its_row() -> None:
    docs = DOCS.read_text()
    section = docs[docs.index("### Engines and clusters") :]
    for _, _, error, do in MISTAKES.values():
        assert error is None or error in section, error
        assert do in section, do
    for words in ("do not fit into the memory of", "cannot be used from here", "Workers could not reach each other"):
        assert words in section
