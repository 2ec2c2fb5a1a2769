"""Agents as tasks of Spark: one for each worker, each the only task of a job of its own.

Whoever loses an executor loses the agents on it, and Spark ends nothing else for that: a barrier stage would end all
of its tasks. The invitation, and with it the secret of the run, travels inside the task. Spark protects it as much as
any other task: between the machines of a cluster not at all, unless it is told to (`spark.authenticate`,
`spark.network.crypto.enabled`).
"""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from shoal.engine.agent import serve
from shoal.engine.greeting import SPARK, greet
from shoal.engine.machine import available_cores
from shoal.engine.wire import Invitation
from shoal.spec.errors import UserError

UNKNOWN_SECONDS, KNOWN_SECONDS = 10.0, 180.0
"""How long to wait for the next executor: where nobody says that one will come, and where Spark asked for them."""
END_SECONDS = 2.0
JVM_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
OPTION = "engine.spark."
"""An option that begins with it is a setting of the session: `engine.spark.executor.memory=2g`."""
_LIGHT_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
OWN = {
    "spark.app.name": "shoal",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.extraJavaOptions": _LIGHT_JAVA,
    "spark.executor.extraJavaOptions": _LIGHT_JAVA,
}
"""Settings of a session of our own. It is quiet, and Java has next to nothing to do in it: it starts with half of the
work where it compiles less."""
_DESCRIPTION = "spark.job.description"
_WAITING = "spark.scheduler.maxRegisteredResourcesWaitingTime"
_COPIES = "spark.speculation.task.duration.threshold"


def make_ground(master: str | None, options: Mapping[str, str]) -> "SparkGround":
    """The Spark session that this process has; else a new one with this master, that ends with the run.

    Without a master that is `local[N]`, with a slot for each core of this machine.
    """
    settings = {name.removeprefix("engine."): text for name, text in options.items() if name.startswith(OPTION)}
    active = import_spark().SparkContext._active_spark_context
    if active is None:
        driver = Driver(master or f"local[{available_cores()}]", settings)
        return SparkGround(driver.context, driver=driver)
    if settings or master not in (None, active.master):
        raise UserError(
            f"This process has a Spark session already, with the master {active.master}.",
            why="there can be one in a process, and its master and settings stay as they are",
            hint="leave --master and the options `engine.spark.*` out, or stop it before: `spark.stop()`",
        )
    return SparkGround(active)


def import_spark() -> Any:
    """PySpark, where it is installed."""
    try:
        import pyspark
    except ImportError:
        raise UserError("Spark is not installed.", hint="run `pip install 'shoal[spark]'`") from None
    return pyspark


def probe(master: str) -> None:
    """Raise UserError unless a master answers at `spark://HOST:PORT,...`: Spark itself would try for a minute."""
    if not master.startswith("spark://"):
        return
    problems = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(
                f"--master {master!r} is not spark://HOST:PORT.", hint="for example: `spark://10.0.0.1:7077`"
            )
        try:
            wrong = greet(host, int(port), SPARK, may_be_tls=True)
            if not wrong:
                return
            problems.append(f"{place}: {wrong}")
        except (OSError, OverflowError) as error:
            problems.append(f"{place}: {getattr(error, 'strerror', None) or error}")
    raise UserError(
        f"No Spark master answers at {master}.",
        why="; ".join(problems),
        hint="check the address in the log of the master, or try one on this machine with `--master 'local[2]'`",
    )


class Driver:
    """A Spark driver of our own: its JVM, and a context. What Java says is kept, and told where it cannot start.

    The JVM is in a session of its own, so that Ctrl-C in a terminal reaches us and not what we are about to end in
    order. It ends with this process, however that ends.
    """

    def __init__(self, master: str, settings: Mapping[str, str]) -> None:
        """Takes 4 s on an idle machine, and far more on a busy one. Raises UserError where there is no such Spark."""
        probe(master)
        spark = import_spark()
        conf = spark.SparkConf().setMaster(master).setAll(list({**OWN, **settings}.items()))
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._gateway: Any = None
        before = signal.getsignal(signal.SIGINT)
        try:
            if spark.SparkContext._gateway is None:  # else there is a JVM left from a session that was stopped
                own = {"stdout": self._said, "stderr": self._said, "start_new_session": True}
                self._gateway = spark.java_gateway.launch_gateway(conf, own)
            with warnings.catch_warnings():
                # It looks whether pandas is there, which we do not use with it.
                warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
                self.context = spark.SparkContext(conf=conf, gateway=self._gateway)
        except BaseException as error:
            said = self._last_words()
            self._end_jvm()
            if isinstance(error, Exception):
                raise _no_session(master, str(error), said) from error
            raise
        finally:
            # A context takes Ctrl-C for itself, to cancel all jobs. We end workers first, and then jobs.
            if threading.current_thread() is threading.main_thread() and before is not None:
                signal.signal(signal.SIGINT, before)

    def close(self) -> None:
        """Say goodbye to the cluster, and end the JVM."""
        with contextlib.suppress(Exception):
            self.context.stop()
        self._end_jvm()

    def _end_jvm(self) -> None:
        if self._gateway is not None:
            held = import_spark().SparkContext
            held._gateway = held._jvm = held._active_spark_context = None
            with contextlib.suppress(Exception):
                self._gateway.shutdown()
            if self._gateway.proc is not None:  # that of `spark-submit` is not ours
                _end(self._gateway.proc)
        self._said.close()

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-20_000:].decode("utf-8", "replace")


def _end(jvm: subprocess.Popen[bytes]) -> None:
    """Let the JVM of a driver end, which it does when its input ends."""
    with contextlib.suppress(OSError):
        assert jvm.stdin is not None
        jvm.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        jvm.wait(JVM_SECONDS)
    jvm.kill()
    jvm.wait()


def _no_session(master: str, error: str, said: str) -> UserError:
    if "JAVA_HOME is not set" in said or "java: No such file" in said or "java: not found" in said:
        return UserError(
            "Java was not found.",
            why="Spark runs in it",
            hint="install a JDK, 17 or newer, and set JAVA_HOME or put `java` on the PATH",
        )
    if found := re.search(r"UnsupportedClassVersionError.*?class file version (\d+)", said, re.DOTALL):
        return UserError(
            "This Java is too old for this Spark.",
            why=f"Spark was made for Java {int(found[1]) - 44} or newer",
            hint=f"install Java {int(found[1]) - 44} and set JAVA_HOME to it",
        )
    lines = [line.strip(" :") for line in [*error.splitlines(), *said.splitlines()]]
    telling = [line for line in lines if re.search(r"Exception: |Error: |Exception in thread", line)]
    return UserError(
        f"No Spark session could be made with the master {master}.",
        why=re.sub(r"^.*?Exception: ", "", (telling or lines or [""])[0])[:400],
        hint="masters are local[N], local-cluster[EXECUTORS,CORES,MB], spark://HOST:PORT, yarn and k8s://URL",
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """One agent to be, and the job whose task it is: a future of Java's. `pause` grows while it fails."""

    number: int
    job: Any = None
    since: float = 0.0
    due: float = 0.0
    pause: float = FIRST_PAUSE


class SparkGround:
    """The executors of a Spark session, or of a context: `SparkGround(spark)`. It is not stopped in the end.

    Workers start together or not at all: no job is submitted before there are slots for those that are needed, all of
    them are submitted one after the other, and Spark serves them in this order. They wait while other jobs of the
    session have the slots. The jobs are Java's futures; nothing of this needs a thread.
    """

    def __init__(self, session: Any, *, driver: Driver | None = None) -> None:
        self._context, self._driver = _context_of(session), driver
        self._master = str(self._context.master)
        self._settings = dict(self._context.getConf().getAll())
        self._is_here = self._master.startswith("local")
        self.host = "127.0.0.1" if self._is_here else self._settings["spark.driver.host"]
        self._slots: list[_Slot] = []
        self._invitation: Invitation | None = None
        self._least = self._most_seen = 0
        self._has_begun = False
        self._grown_at = 0.0

    def open(self, invitation: Invitation, num_slots: int, least: int) -> int:
        self._invitation, self._least, self._grown_at = invitation, least, time.monotonic()
        check_copies(self._settings)
        with _spark_may_be_gone():
            most = most_slots(self._master, self._settings, self._num_slots())
            if most is not None and most < least:
                raise _too_few(most, least, self._master)
            self._slots = [_Slot(number=number) for number in range(num_slots)]
            self._begin()
        return num_slots

    def look(self) -> Sequence[UserError]:
        now, kept_away = time.monotonic(), []
        with _spark_may_be_gone():
            self._check_session()
            if not self._has_begun:
                self._begin()
            for slot in self._slots:
                if slot.job is not None and slot.job.isDone():
                    kept_away += self._end(slot)
                elif slot.job is None and slot.due and now >= slot.due:
                    self._submit(slot)
        return kept_away

    def waiting_for(self, present: Collection[str]) -> str:
        with _spark_may_be_gone():
            slots = self._num_slots()
        if slots < len(self._slots):
            return f"Spark has {_slots(slots)} for tasks, and {len(self._slots)} are wanted"
        return "tasks of Spark are starting, or other jobs have its slots"

    def replace(self, agent: str) -> None:
        slot = self._slots[int(agent)]
        if slot.job is not None:
            with contextlib.suppress(Exception):
                slot.job.cancel(True)
            self._later(slot)

    def close(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        with contextlib.suppress(Exception):  # a Spark that is gone needs no giving back
            jobs = [slot.job for slot in self._slots if slot.job is not None]
            while not all(job.isDone() for job in jobs) and time.monotonic() < deadline:
                time.sleep(0.02)
            for job in jobs:
                job.cancel(True)
        self._slots = []
        if self._driver is not None:
            self._driver.close()

    def _begin(self) -> None:
        """Submit all jobs once there are slots for those needed; with dynamic allocation, jobs make slots."""
        slots = self._num_slots()
        if slots >= self._least or is_dynamic(self._settings):
            self._has_begun = True
            for slot in self._slots:
                self._submit(slot)
            return
        if slots > self._most_seen:
            self._most_seen, self._grown_at = slots, time.monotonic()
        if time.monotonic() > self._grown_at + self._patience():
            raise _too_few(slots, self._least, self._master)

    def _patience(self) -> float:
        if _WAITING in self._settings:
            java = self._context._jvm.org.apache.spark.network.util.JavaUtils
            return float(java.timeStringAsSec(self._settings[_WAITING]))
        return UNKNOWN_SECONDS if self._master.startswith("spark://") else KNOWN_SECONDS

    def _check_session(self) -> None:
        if self._context._jsc is None:
            raise ConnectionError("it was stopped")

    def _num_slots(self) -> int:
        """How many tasks could run at once on the executors that are there now, if nobody else used them."""
        self._check_session()
        spark = self._context._jsc.sc()
        return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))

    def _submit(self, slot: _Slot) -> None:
        assert self._invitation is not None
        context, python = self._context, self._context.pythonExec
        described = context.getLocalProperty(_DESCRIPTION)
        rows = context.parallelize([slot.number], 1).mapPartitions(partial(be_agent, self._invitation, slot.number))
        rows._bypass_serializer = True  # they are bytes already
        try:
            context.setLocalProperty(_DESCRIPTION, f"shoal: agent {slot.number}")
            if self._is_here:  # where `python3` may be another, without shoal
                context.pythonExec = sys.executable
            slot.job = rows._jrdd.collectAsync()
        finally:
            context.pythonExec = python
            context.setLocalProperty(_DESCRIPTION, described)
        slot.since, slot.due = time.monotonic(), 0.0

    def _end(self, slot: _Slot) -> list[UserError]:
        """A job ended, with its agent; returns why. Raises it where those needed will end like this again."""
        why = _why_ended(slot.job)
        self._later(slot)
        if why is not None and slot.number < self._least:
            raise why
        return [] if why is None else [why]

    def _later(self, slot: _Slot) -> None:
        now = time.monotonic()
        slot.pause = FIRST_PAUSE if now - slot.since > LONGEST_PAUSE else slot.pause
        slot.job, slot.due = None, now + slot.pause
        slot.pause = min(LONGEST_PAUSE, 2 * slot.pause)


def be_agent(invitation: Invitation, number: int, rows: Iterable[Any]) -> Iterator[bytes]:
    """The task: be an agent in the Python worker of an executor, until the run is over.

    Spark runs a task again that ended with its executor. We would not know of it, so that is left to the launcher,
    which submits a new job where it still needs one.
    """
    from pyspark import TaskContext

    list(rows)  # Spark uses a Python process again only if it has read all of its input
    context = TaskContext.get()
    if context is not None and context.attemptNumber() > 0:
        return
    try:
        serve(invitation, str(number), socket.gethostname(), 1)
    except UserError as error:
        yield json.dumps([error.message, error.why, error.hint]).encode()


def most_slots(master: str, settings: Mapping[str, str], now: int) -> int | None:
    """As many tasks as can ever run at once, or None where nobody knows. `now` is how many can at the moment."""
    per_task = int(settings.get("spark.task.cpus", "1"))
    if found := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*]", master):
        return int(found[1]) * (int(found[2]) // per_task)
    if master.startswith("local"):
        return now
    if master.startswith("spark://"):
        return int(settings["spark.cores.max"]) // per_task if "spark.cores.max" in settings else None
    if is_dynamic(settings):
        executors = settings.get("spark.dynamicAllocation.maxExecutors", "infinity")
    else:
        executors = settings.get("spark.executor.instances", "2")
    cores = int(settings.get("spark.executor.cores", "1"))
    return int(executors) * (cores // per_task) if executors.isdecimal() else None


def is_dynamic(settings: Mapping[str, str]) -> bool:
    """Whether Spark starts executors when jobs wait for them."""
    return settings.get("spark.dynamicAllocation.enabled", "false").lower() == "true"


def check_copies(settings: Mapping[str, str]) -> None:
    """Raise UserError where Spark would start copies of long tasks, and end a worker when its copy ends."""
    if settings.get("spark.speculation", "false").lower() == "true" and _COPIES in settings:
        raise UserError(
            f"Spark is to start a copy of each task that takes longer than {settings[_COPIES]}.",
            why="a worker is a task that takes as long as the run does",
            hint=f"make a session without the setting {_COPIES}, or with spark.speculation=false",
        )


def _context_of(session: Any) -> Any:
    import_spark()
    if ".connect." in type(session).__module__:
        raise UserError(
            "This Spark session is one of Spark Connect.",
            why="it cannot start tasks that wait for a launcher here",
            hint="make one where the driver runs: `SparkSession.builder.master('spark://HOST:PORT').getOrCreate()`",
        )
    context = getattr(session, "sparkContext", session)
    if not hasattr(context, "parallelize"):
        raise UserError(f"A Spark session was expected, not a {type(session).__name__}.")
    if context._jsc is None:
        raise UserError(
            "This Spark session has been stopped.", hint="make another: `SparkSession.builder.getOrCreate()`"
        )
    return context


@contextlib.contextmanager
def _spark_may_be_gone() -> Iterator[None]:
    """Say UserError where the driver's JVM does not answer, or the session was stopped."""
    from py4j.protocol import Py4JError

    try:
        yield
    except (Py4JError, OSError) as error:
        raise UserError(
            "The Spark session is gone.",
            why=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            hint="its JVM was killed, perhaps for want of memory, or somebody has stopped it; make another",
        ) from error


def _why_ended(job: Any) -> UserError | None:
    """Why an agent could not work; None where it ended in an ordinary way, or with its executor."""
    from py4j.protocol import Py4JJavaError

    try:
        rows = list(job.get())
    except Py4JJavaError as error:
        return _why_failed(str(error))
    if not rows:
        return None
    message, why, hint = json.loads(bytes(rows[0]))
    return UserError(message, why=why, hint=hint)


def _why_failed(said: str) -> UserError | None:
    if "exited unexpectedly" in said or "ExecutorLostFailure" in said or "ancelled" in said:
        return None
    found = re.search(r"(ModuleNotFoundError: .*|PYTHON_VERSION_MISMATCH.*|Cannot run program .*)", said)
    return UserError(
        "An agent could not be started on an executor of Spark.",
        why=found[1][:300] if found else " ".join(said.split())[:300],
        hint="install the same Python, torch and shoal on all machines of the cluster; the variable PYSPARK_PYTHON "
        "names the Python that executors use",
    )


def _too_few(slots: int, least: int, master: str) -> UserError:
    return UserError(
        f"Spark has {_slots(slots)} for tasks, and {least} workers are needed.",
        why=f"the master is {master}, and each worker is a task; a slot has as many cores as spark.task.cpus says",
        hint="use `-n` with fewer, or have more or larger executors: local[N], spark.executor.instances, "
        f"spark.executor.cores, spark.cores.max. If they are slow to come, wait longer: `-o engine.{_WAITING}=2min`",
    )


def _slots(count: int) -> str:
    return f"{count} slot{'s' * (count != 1)}"
