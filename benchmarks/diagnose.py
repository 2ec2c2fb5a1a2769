"""Whether a run that falls ill says what it has, and who: twelve illnesses, given to real processes one at a time.

Three more are counted by themselves: a slow stage of a pipeline, a slow worker among those that hold slices of
layers, and a slow copy of those that train by themselves.

In each trial it is another rank's turn, of three; up to three trials follow each other in one run. One is **right**
if the first `diagnosis` in the journal (or, where the disk is full, on the terminal) has the right cause and the
right rank, and comes at most 5 s after the illness was first felt: the worker was killed or stopped, the first slow
sample was computed, the disk was full, the last worker came to meet the others. Anything else that is diagnosed
counts as wrong, also beside a right one: **precision** is the right ones of all that were told.

**A slow rank** takes twice as long for each sample from a random moment on. Counted is in how many steps of the run
it is named.

**Clean minutes** are of runs that nothing is done to: over shared memory, over sockets, elastic, in a pipeline, and
of copies that train by themselves. Any diagnosis there is a false alarm, and so is any alert. `--clean-minutes` says
how long; the goal is 30. They pass while the trials are made, on a machine that is busy with these.

Ctrl-C ends it early, with what is known by then.

Slow links, wrong interfaces and clocks that are off need hosts with a network and an environment of their own; they
are made of network namespaces (`rigs.hosts`), and mpirun starts the agents. Where a machine lacks what that takes,
those illnesses are left out, and the result says so.
"""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import say
from shoal.observe import journal, metrics
from shoal.spec.event import Event
from shoal.testing import rigs
from shoal.testing.rigs import leftovers

SCRIPT = str(Path(__file__).parent / "ailing" / "train.py")
NUM_WORKERS = 3
TRIALS = 10
LIMIT_SECONDS = 5.0
PATIENCE_SECONDS = 20.0
READY_SECONDS = 90.0
WAYS = {"slow_stage": "split=pipeline:3,microbatches=4", "slow_slice": "split=tensor:3", "slow_copy": "sync=local:4"}
"""What the slow rank has of a model, and how the run is started then."""
FEW_STEPS = 45
"""A run that has taken so many is well, and may fall ill."""

ENTER = """\
#!/bin/sh
case "$1" in
{cases}
esac
shift
exec nsenter --net=$network sh -c "$*"
"""


@dataclass(kw_only=True)
class Run:
    """One run of the ailing script, and the folder that it and we leave notes in."""

    folder: Path
    patient: int
    process: subprocess.Popen[str]
    run_dir: Path
    felt: float | None = None
    num_known: int = 0

    def events(self) -> list[Event]:
        return list(journal.read(str(self.run_dir / "journal.jsonl")))

    def diagnoses(self) -> list[Event]:
        """What was told since the last trial of this run."""
        return self._all_diagnoses()[self.num_known :]

    def begin(self, patient: int) -> None:
        """The next trial."""
        self.patient, self.felt = patient, None
        self.num_known = len(self._all_diagnoses())

    def _all_diagnoses(self) -> list[Event]:
        found = [event for event in self.events() if event.kind == "diagnosis"]
        return found or self._shown()

    def _shown(self) -> list[Event]:
        """What the terminal says, where the journal cannot be written."""
        text = (self.folder / "terminal").read_text(errors="replace")
        marks = [line for line in text.splitlines() if "cannot write to its disk: it is full" in line]
        told = [line.split("Rank ")[1].split()[0] for line in marks if "Rank " in line]
        when = (self.folder / "terminal").stat().st_mtime
        return [Event(kind="diagnosis", time=when, rank=int(rank), data={"cause": "disk_full"}) for rank in told]

    def pid(self, rank: int) -> int:
        started = [event for event in self.events() if event.kind == "worker_started" and event.rank == rank]
        return int(started[-1].data["pid"])

    def last_step(self) -> int:
        """How many steps all workers have taken."""
        steps = metrics.read(str(self.run_dir))
        told = [rows[-1].step + 1 for rows in steps.values() if rows]
        return min(told) if len(told) == NUM_WORKERS else 0

    def step_at(self, moment: float) -> int:
        rows = next(iter(metrics.read(str(self.run_dir)).values()), [])
        return max((row.step for row in rows if row.time <= moment), default=0)

    def strike(self) -> None:
        """Let the script fall ill, and wait until it feels it."""
        (self.folder / "struck").unlink(missing_ok=True)
        passing = self.folder / "next"
        passing.write_text(str(self.patient))
        passing.rename(self.folder / "go")
        wait_until(lambda: (self.folder / "struck").exists() or self.process.poll() is not None, READY_SECONDS)
        struck = self.folder / "struck"
        self.felt = float(struck.read_text() or time.time()) if struck.exists() else time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Illness:
    """`causes` are those that are right. `strike(run)` gives it to a run; None: it has it from the beginning.

    `is_anyones`: the rank says nothing, because all of them share what is broken. `heal(run)` ends it, and another
    rank of the same run may have it next; None: the run is not good for more. `is_extra`: not one of the twelve.
    """

    name: str
    causes: tuple[str, ...]
    strike: Callable[[Run], None] | None = None
    heal: Callable[[Run], None] | None = None
    options: tuple[str, ...] = ()
    is_anyones: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    needs_hosts: bool = False
    needs_small_disk: bool = False
    is_extra: bool = False


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def send(number: int) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        os.kill(run.pid(run.patient), number)
        run.felt = time.time()

    return strike


class Cluster:
    """Three hosts that mpirun reaches, each with an environment of its own. The launcher is on host 0."""

    def __init__(self, hosts: rigs.Hosts, folder: Path, clock: Any) -> None:
        self.hosts, self.folder, self.clock = hosts, folder, clock
        self._enter = folder / "enter"

    def command(self, extra: Mapping[int, str]) -> list[str]:
        """The options of `shoal run`; `extra` are shell words to be done first on a host."""
        cases = "\n".join(
            f"  {self.hosts.address(host)}) network={leftovers.NAMESPACES / name}; {extra.get(host, ':')} ;;"
            for host, name in enumerate(self.hosts.names)
        )
        self._enter.write_text(ENTER.format(cases=cases))
        self._enter.chmod(0o755)
        where = ",".join(f"{self.hosts.address(host)}:1" for host in range(NUM_WORKERS))
        mpirun = f"--mca plm_rsh_agent {self._enter} --mca oob_tcp_if_include {self.hosts.interface}"
        return ["--engine", "mpi", "--hosts", where, "-o", f"engine.mpirun={mpirun}", "-o", "transport=tcp"]


@contextmanager
def start(illness: Illness, patient: int, cluster: Cluster | None, is_elastic: bool) -> Iterator[Run]:
    """A run of three workers; everything of it is gone in the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-ailing-", ignore_cleanup_errors=True))
        )
        run_dir = folder / "run"
        env = {**os.environ, "SHOAL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", **illness.env}
        if illness.needs_small_disk:
            disk = stack.enter_context(rigs.small_disk(24 if illness.is_anyones else 4))
            env["AILING_SCRATCH"] = str(disk.path)
            run_dir = disk.path / "run" if illness.is_anyones else run_dir
        workers = f"{NUM_WORKERS - 1}:{NUM_WORKERS}" if is_elastic else str(NUM_WORKERS)
        words = ["run", "-n", workers, "--log-dir", str(run_dir), "--threads", "1", *illness.options]
        command = [sys.executable, "-m", "shoal", *words]
        if illness.needs_hosts and cluster is not None:
            command += cluster.command(_extra(illness, patient, cluster))
        command += [SCRIPT, str(folder), str(patient), illness.name]
        if illness.needs_hosts and cluster is not None:
            command = cluster.hosts.command(0, command)
        with (folder / "terminal").open("w") as terminal:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, text=True
            )
        run = Run(folder=folder, patient=patient, process=process, run_dir=run_dir)
        try:
            yield run
        finally:
            _end(run)


def _extra(illness: Illness, patient: int, cluster: Cluster) -> dict[int, str]:
    if illness.name == "wrong_interface":
        return {patient: "export GLOO_SOCKET_IFNAME=other0"}
    if illness.name == "clock_skew":
        words = " ".join(f"{name}={value}" for name, value in cluster.clock.env.items())
        return {patient: f"export {words}"}
    return {}


def _end(run: Run) -> None:
    if run.process.poll() is None:
        with contextlib.suppress(OSError, IndexError):  # what is stopped does not end
            os.kill(run.pid(run.patient), signal.SIGCONT)
        run.process.send_signal(signal.SIGTERM)
        try:
            run.process.wait(15)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


def try_some(
    illness: Illness, patients: Sequence[int], cluster: Cluster | None, *, is_elastic: bool
) -> list[dict[str, Any]]:
    """One trial after the other in one run: what was told of each patient, and whether that is right."""
    results = []
    with start(illness, patients[0], cluster, is_elastic) as run:
        for patient in patients:
            is_anyones = {"is_anyones": True} if illness.is_anyones else {}
            results.append(_try_once(illness, patient, run) | is_anyones)
            say(f"{illness.name} of rank {patient}: {results[-1]}")
            is_over = illness.name == "dead" and not is_elastic
            if illness.heal is None or is_over or run.process.poll() is not None:
                break
            illness.heal(run)
    return results


def _try_once(illness: Illness, patient: int, run: Run) -> dict[str, Any]:
    run.begin(patient)
    if illness.strike is None:
        ready = [run.folder / f"ready-{rank}" for rank in range(NUM_WORKERS)]
        wait_until(lambda: all(each.exists() for each in ready), READY_SECONDS)
        run.felt = time.time()
    else:
        goal = FEW_STEPS + run.last_step()
        if not wait_until(lambda: run.last_step() >= goal or run.process.poll() is not None, READY_SECONDS):
            return {"verdict": "never began", "told": _tail(run)}
        if early := run.diagnoses():
            return {"verdict": "alarm before", "num_told": len(early), "told": _tell(early)}
        time.sleep(random.uniform(0.0, 0.5))
        illness.strike(run)
    assert run.felt is not None
    wait_until(run.diagnoses, PATIENCE_SECONDS)
    time.sleep(1.0)  # what else is told
    return _judge(illness, run, run.diagnoses())


def _judge(illness: Illness, run: Run, found: list[Event]) -> dict[str, Any]:
    assert run.felt is not None
    if not found:
        return {"verdict": "nothing told", "told": _tail(run)}
    right = [
        event
        for event in found
        if event.data["cause"] in illness.causes and (event.rank == run.patient or illness.is_anyones)
    ]
    seconds = max(0.0, right[0].time - run.felt) if right else None
    verdict = "right" if right and right[0] is found[0] else "wrong"
    if verdict == "right" and seconds is not None and seconds > LIMIT_SECONDS:
        verdict = "late"
    result = {"verdict": verdict, "num_right": len(right), "num_told": len(found), "seconds": seconds}
    if verdict != "right" or len(right) < len(found):
        result["told"] = _tell(found)
    if right and right[0].step is not None:
        result["steps"] = max(0, right[0].step - run.step_at(run.felt))
    return result


def _tell(found: list[Event]) -> list[str]:
    return [f"{event.data['cause']} of rank {event.rank}: {event.data.get('why', '')}" for event in found]


def _tail(run: Run) -> list[str]:
    return (run.folder / "terminal").read_text(errors="replace").splitlines()[-6:]


def illnesses(cluster: Cluster | None) -> list[Illness]:
    by_script = Run.strike
    tcp = ("-o", "transport=tcp")

    def slow_link(run: Run) -> None:
        assert cluster is not None
        cluster.hosts.shape(run.patient, rate_mbit=40)
        run.felt = time.time()

    def skew(run: Run) -> None:
        assert cluster is not None
        cluster.clock.jump(random.choice([-60.0, 45.0]))
        run.felt = time.time()

    def heal_script(run: Run) -> None:
        (run.folder / "go").unlink(missing_ok=True)

    def heal_frozen(run: Run) -> None:
        os.kill(run.pid(run.patient), signal.SIGCONT)

    def heal_dead(run: Run) -> None:
        """Its replacement is there."""

    def heal_host(run: Run) -> None:
        assert cluster is not None
        cluster.hosts.shape(run.patient)
        cluster.clock.jump(0.0)

    def fill(run: Run) -> None:
        rigs.SmallDisk(run.run_dir.parent).fill()
        run.felt = time.time()

    return [
        Illness(name="dead", causes=("dead",), strike=send(signal.SIGKILL), heal=heal_dead),
        Illness(name="frozen", causes=("frozen",), strike=send(signal.SIGSTOP), heal=heal_frozen),
        Illness(name="slow_input", causes=("slow_input",), strike=by_script, heal=heal_script),
        Illness(name="slow_backward", causes=("slow_compute",), strike=by_script, heal=heal_script),
        Illness(name="slow_link", causes=("slow_link",), strike=slow_link, heal=heal_host, needs_hosts=True),
        Illness(name="uneven_data", causes=("uneven_data",), strike=by_script, heal=heal_script),
        Illness(name="shape_mismatch", causes=("shape_mismatch",)),
        Illness(name="wrong_interface", causes=("wrong_interface",), needs_hosts=True),
        Illness(name="nan", causes=("nan",), strike=by_script, heal=heal_script),
        Illness(name="disk_full", causes=("disk_full",), strike=by_script, needs_small_disk=True),
        Illness(name="disk_full", causes=("disk_full",), strike=fill, is_anyones=True, needs_small_disk=True),
        Illness(name="clock_skew", causes=("clock_skew",), strike=skew, needs_hosts=True),
        Illness(name="diverged", causes=("diverged",), strike=by_script, heal=heal_script, options=tcp),
        *(
            Illness(
                name=name,
                causes=("slow_compute",),
                strike=by_script,
                heal=heal_script,
                options=("-o", option),
                is_extra=True,
            )
            for name, option in WAYS.items()
        ),
    ]


@contextmanager
def make_cluster() -> Iterator[Cluster | None]:
    """Hosts, where they can be made."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(rigs.hosts(NUM_WORKERS))
            clock = stack.enter_context(rigs.clock_jump(is_cheap=True))
        except rigs.RigMissing as error:
            say(f"without hosts: {error}")
            yield None
            return
        for host, name in enumerate(hosts.names):
            for words in (
                "link add other0 type veth peer name other1",
                f"addr add 10.99.{host}.1/24 dev other0",
                "link set other0 up",
            ):
                subprocess.run(["ip", "-n", name, *words.split()], check=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-ailing-hosts-")))
        yield Cluster(hosts, folder, clock)


def measure(num_trials: int, names: tuple[str, ...] = ()) -> dict[str, list[dict[str, Any]]]:
    """Every illness so often, some trials of each in turn; its name -> what became of them."""
    results: dict[str, list[dict[str, Any]]] = {}
    with make_cluster() as cluster, contextlib.suppress(KeyboardInterrupt):
        known = [each for each in illnesses(cluster) if not names or each.name in names]
        while any(len(results.get(each.name, ())) < num_trials for each in known):
            for name in dict.fromkeys(illness.name for illness in known):
                kinds = [each for each in known if each.name == name]
                if cluster is not None or not kinds[0].needs_hosts:
                    trials = results.setdefault(name, [])
                    trials += _next_trials(kinds, len(trials), num_trials, cluster)
    return results


def _next_trials(
    kinds: Sequence[Illness], num_done: int, num_trials: int, cluster: Cluster | None
) -> list[dict[str, Any]]:
    """Up to three more, in one run."""
    if num_done >= num_trials:
        return []
    illness = kinds[num_done // 2 % len(kinds)]
    patients = [patient_of(illness, trial) for trial in range(num_done, min(num_done + NUM_WORKERS, num_trials))]
    is_elastic = illness.name in ("dead", "frozen") and num_done % 2 == 0
    try:
        return try_some(illness, list(dict.fromkeys(patients)), cluster, is_elastic=is_elastic)
    finally:
        if cluster is not None and illness.needs_hosts:
            for host in range(NUM_WORKERS):
                cluster.hosts.shape(host)
            cluster.clock.jump(0.0)


def patient_of(illness: Illness, trial: int) -> int:
    """Another rank each time. What mpirun starts on its own host has that host's own environment."""
    return 1 + trial % (NUM_WORKERS - 1) if illness.needs_hosts else trial % NUM_WORKERS


_is_over = threading.Event()


def _await_end(run: Run, seconds: float) -> None:
    wait_until(lambda: run.process.poll() is not None or _is_over.is_set(), seconds)


def measure_clean(minutes: float) -> dict[str, Any]:
    """Runs that nothing is done to, one after the other, and what they told nevertheless."""
    kinds = {
        "shared memory": "none",
        "sockets": "none",
        "elastic": "none",
        "pipeline": "slow_stage",
        "local": "slow_copy",
    }
    alarms: list[str] = []
    alerts: list[str] = []
    spent = 0.0
    for name, way in kinds.items():
        option = "transport=tcp" if name == "sockets" else WAYS.get(way)
        illness = Illness(name=way, causes=(), options=("-o", option) if option else ())
        if _is_over.is_set():
            break
        with start(illness, 0, None, is_elastic=name == "elastic") as run:
            wait_until(lambda run=run: run.last_step() >= FEW_STEPS, READY_SECONDS)  # type: ignore[misc]
            began = time.monotonic()
            _await_end(run, 60 * minutes / len(kinds))
            spent += time.monotonic() - began
            alarms += [f"{name}: {text}" for text in _tell(run.diagnoses())]
            found = [event for event in run.events() if event.kind == "alert"]
            alerts += [f"{name}: {event.data.get('rule')} of rank {event.rank}" for event in found]
            say(f"clean, {name}: {run.last_step()} steps, alarms {alarms}, alerts {alerts}")
    return {
        "minutes": round(spent / 60, 2),
        "alarms": alarms,
        "num_alarms": len(alarms),
        "alerts": alerts,
        "num_alerts": len(alerts),
    }


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as beside:
        clean = beside.submit(measure_clean, 0.1 if is_quick else harness.CLEAN_MINUTES)
        try:
            results = measure(1, ("dead", "slow_backward")) if is_quick else measure(max(rounds, TRIALS))
        except BaseException:
            _is_over.set()
            raise
        if sum(map(len, results.values())) < len(results) * max(rounds, TRIALS) and not is_quick:
            _is_over.set()  # somebody has had enough
        return summarize(results, clean.result())


def summarize(results: Mapping[str, list[dict[str, Any]]], clean: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for name, trials in results.items():
        seconds = [trial["seconds"] for trial in trials if trial.get("seconds") is not None]
        steps = [trial["steps"] for trial in trials if "steps" in trial]
        rows.append(
            {
                "illness": name,
                "right": sum(trial["verdict"] == "right" for trial in trials),
                "of": len(trials),
                "median s": statistics.median(seconds) if seconds else "",
                "most s": max(seconds, default=""),
                "median steps": statistics.median(steps) if steps else "",
                "most steps": max(steps, default=""),
            }
        )
    extra = [trial for name in WAYS for trial in results.get(name, ())]
    every = [trial for name, trials in results.items() if name not in WAYS for trial in trials]
    told = sum(trial.get("num_told", 0) for trial in every)
    precision = sum(trial.get("num_right", 0) for trial in every) / max(1, told)
    slow = [trial["steps"] for trial in results.get("slow_backward", []) if "steps" in trial]
    return {
        "rows": rows,
        "checks": [
            _right("right rank and cause in 5 s", every),
            _check("precision", precision, "≥ 0.95"),
            _check("steps until a rank twice as slow is named, most", float(max(slow, default=999)), "≤ 20"),
            *([_right("slow parts and copies right in 5 s", extra)] if extra else []),
            _check(f"alerts in {clean['minutes']} clean minutes", float(clean["num_alerts"]), "≤ 0"),
            _check(f"alarms in {clean['minutes']} clean minutes", float(clean["num_alarms"]), "≤ 0"),
        ],
        "notes": [*harness.tell_company(), *_tell_anyones(results)],
        "trials": dict(results),
        "clean": dict(clean),
    }


def _right(what: str, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    num_right = sum(trial["verdict"] == "right" for trial in trials)
    return _check(what, num_right / max(1, len(trials)), "≥ 0.95")


def _tell_anyones(results: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Of which trials the rank says nothing."""
    numbers = {name: sum(trial.get("is_anyones", False) for trial in trials) for name, trials in results.items()}
    return [
        f"{count} of {len(results[name])} trials of {name} count whichever rank is named: all share what is broken"
        for name, count in numbers.items()
        if count
    ]


def _check(what: str, measured: float, goal: str) -> dict[str, Any]:
    sign, number = goal.split()
    is_met = measured >= float(number) if sign == "≥" else measured <= float(number)
    return {"goal of": what, "measured": measured, "goal": goal, "verdict": "met" if is_met else "missed"}
