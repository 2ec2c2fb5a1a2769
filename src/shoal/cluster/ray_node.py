"""Ray on this machine: started with ports and folders of our choice, and ended without touching anybody else's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

from shoal.cluster.files import make_folder, write_cluster
from shoal.cluster.ports import Ports
from shoal.cluster.reach import listening
from shoal.engine.clusters import HEAD, Cluster, Process, boot_id, processes_of
from shoal.engine.env import inherited_env
from shoal.spec.errors import ShoalError, UserError

START_SECONDS = 180.0
MIN_SHARED_BYTES = 128 << 20
_TOLD_SECONDS = 5.0

Say = Callable[[str], None]


def temp_dir_for(folder: str) -> str:
    """Where Ray writes: a short path, because it makes sockets there, and one of its own for every SHOAL_HOME."""
    return f"/tmp/shoal-ray-{sha256(folder.encode()).hexdigest()[:8]}"


def check_shared_memory(path: str = "/dev/shm") -> None:
    """Raise UserError where Ray's object store would not fit."""
    try:
        there = os.statvfs(path)
        free = there.f_bavail * there.f_frsize
    except OSError as error:
        raise UserError(
            f"There is no {path}.", why=error.strerror or str(error), hint="mount a tmpfs there"
        ) from None
    if free < MIN_SHARED_BYTES:
        raise UserError(
            f"{path} has only {free >> 20} MiB left.",
            why=f"Ray keeps objects there, and needs {MIN_SHARED_BYTES >> 20} MiB to begin with",
            hint=f"`mount -o remount,size=2G {path}`; in a container start it with `--shm-size=2g`",
        )


def start_command(cluster: Cluster, worker_ports: Sequence[int]) -> list[str]:
    """The command that starts Ray here."""
    ports = Ports(cluster.port)
    numbers = {
        "--node-manager-port": ports.node_manager,
        "--object-manager-port": ports.object_manager,
        "--dashboard-agent-grpc-port": ports.agent_grpc,
        "--dashboard-agent-listen-port": ports.agent_http,
        "--runtime-env-agent-port": ports.runtime_env,
        "--metrics-export-port": ports.metrics,
    }
    if cluster.role == HEAD:
        numbers |= {"--port": ports.gcs, "--ray-client-server-port": ports.client}
        place = ["--head", "--include-dashboard=false", "--no-monitor"]
    else:
        place = [f"--address={cluster.address}"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", *place),
        *(f"{flag}={number}" for flag, number in numbers.items()),
        f"--worker-port-list={','.join(map(str, worker_ports))}",
        f"--node-ip-address={cluster.node_address}",
        f"--node-name={cluster.name}",
        f"--labels={cluster.labels}",
        f"--temp-dir={cluster.temp_dir}",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]


def start(cluster: Cluster, say: Say) -> Cluster:
    """Start Ray here and wait until it is up; returns the cluster with the session that Ray's processes are in.

    Ray gives its agents 15 s to start, however busy the machine is (ray-project/ray#65983): where it says that time
    was too short it is tried once more, with all its files read already.
    """
    try:
        return _start_once(cluster, say)
    except ShoalError as error:
        if "timed out during startup" not in error.why:
            raise
    say("Ray took too long to start on this machine; trying once more")
    return _start_once(cluster, say)


def _start_once(cluster: Cluster, say: Say) -> Cluster:
    make_folder(cluster.temp_dir)
    with listening(Ports(cluster.port).workers) as free:
        worker_ports = list(free)
    env = inherited_env() | cluster.env | {"DASHBOARD_METRIC_PORT": str(Ports(cluster.port).head_metrics)}
    # Ray would take it for the cluster to join.
    del env["RAY_ADDRESS"]
    with open(cluster.path("ray.log"), "wb") as log:
        starting = subprocess.Popen(
            start_command(cluster, worker_ports),
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    cluster = replace(cluster, session=starting.pid, boot=boot_id())
    write_cluster(cluster)
    try:
        code = _wait(starting, say)
    except BaseException:
        starting.kill()
        starting.wait()
        stop(cluster, lambda _: None)
        raise
    if code != 0:
        stop(cluster, lambda _: None)
        raise ShoalError(
            "Ray did not start.",
            why=_last_words(cluster.path("ray.log")) or f"it exited with {code}",
            hint=f"its own words are in {cluster.path('ray.log')} and {cluster.temp_dir}/session_latest/logs",
        )
    return cluster


def _wait(starting: "subprocess.Popen[bytes]", say: Say) -> int:
    began = time.monotonic()
    while time.monotonic() < began + START_SECONDS:
        try:
            return starting.wait(_TOLD_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"Ray is being started: {time.monotonic() - began:.0f} s so far")
    raise ShoalError(
        f"Ray did not start within {START_SECONDS:.0f} s.", hint="see what else keeps this machine busy; try again"
    )


def _last_words(path: str) -> str:
    """The end of what Ray said, as one line."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read().splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:]


def stop(cluster: Cluster, say: Say) -> int:
    """End Ray here, for this cluster only; returns how many processes it had.

    The raylet goes first: it tells the head that this machine leaves, and ends its workers.
    """
    there = processes_of(cluster)
    for chosen, wait_seconds in ((_is_raylet, 8.0), (_is_not_head, 3.0), (_is_any, 3.0)):
        _signal([each for each in processes_of(cluster) if chosen(each)], signal.SIGTERM)
        _await_end(cluster, chosen, wait_seconds, say)
    _signal(processes_of(cluster), signal.SIGKILL)
    _await_end(cluster, _is_any, 5.0, say)
    return len(there)


def _is_raylet(process: Process) -> bool:
    return "/raylet " in process.title


def _is_not_head(process: Process) -> bool:
    return "/gcs_server " not in process.title


def _is_any(_: Process) -> bool:
    return True


def _signal(processes: Sequence[Process], number: int) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except OSError:
            continue


def _await_end(cluster: Cluster, chosen: Callable[[Process], bool], seconds: float, say: Say) -> None:
    began = told = time.monotonic()
    while time.monotonic() < began + seconds and (left := [p for p in processes_of(cluster) if chosen(p)]):
        if time.monotonic() > told + _TOLD_SECONDS:
            told = time.monotonic()
            say(f"waiting for {len(left)} of Ray's processes to end")
        time.sleep(0.1)
