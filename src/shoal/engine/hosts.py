"""Machines that a command can start a process on: mpirun, or anything else that reaches them."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from shoal.engine.agent import CONNECTED
from shoal.engine.place import host_names, tasks_per_node
from shoal.engine.wire import Invitation
from shoal.spec.errors import UserError

AGENT = ("-m", "shoal.engine.agent")
"""Arguments of a Python that is to be an agent; it reads its invitation from its input."""
COME_SECONDS = 7.0
"""A run that needs an agent which has not come by then is told why, if nobody says how long it should wait."""
HUNG_SECONDS = 60.0
"""A command that has not brought one by then will not: it is ended, and tried again."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
MAX_ERROR_BYTES = 20_000
END_SECONDS, TERM_SECONDS = 2.0, 1.0
"""What the commands of all hosts get to end by themselves, and then to see to it that nothing is left over there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, and how many workers may be on it."""

    name: str
    num_slots: int = 1


@dataclass(slots=True, kw_only=True, eq=False)
class _Started:
    """The command that keeps an agent on one host. `pause` grows while it fails."""

    host: Host
    order: int
    process: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None
    since: float = 0.0
    due: float = 0.0
    pause: float = FIRST_PAUSE


class HostsGround:
    """Starts one agent on each host, with a command of its own: where one host is lost, the others stay.

    `command_of` gives the command that runs a Python with arguments on a host, with our input as its input. The
    invitation holds the secret of the run, so it goes by that way, not by a command line that others may read.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        host: str,
        command_of: Callable[[str, Sequence[str]], list[str]],
        wait_seconds: float = HUNG_SECONDS,
    ) -> None:
        """`wait_seconds` is how long a run that cannot begin waits for an agent of which nothing is heard."""
        self.host = host
        self._wait_seconds, self._has_begun = wait_seconds, False
        self._command_of = command_of
        self._started = [_Started(host=each, order=order) for order, each in enumerate(hosts)]
        self._invitation: Invitation | None = None
        self._num_wanted = self._least = 0

    def open(self, invitation: Invitation, num_slots: int, least: int) -> int:
        there = sum(each.host.num_slots for each in self._started)
        if there < least:
            raise UserError(
                f"The hosts have {there} slot{'s' * (there != 1)}, and {least} workers are needed.",
                why=", ".join(f"{each.host.name}:{each.host.num_slots}" for each in self._started),
                hint="name more hosts, or more slots of each: `--hosts a:4,b:4`",
            )
        self._invitation, self._num_wanted, self._least = invitation, num_slots, least
        for each in self._started:
            self._start(each)
        return num_slots

    def look(self) -> Sequence[UserError]:
        now, kept_away = time.monotonic(), self._look_for_late()
        for each in self._started:
            if each.process is None and each.due and now >= each.due:
                self._start(each)
        gone = [each for each in self._started if each.process is not None and each.process.poll() is not None]
        for each in self._started:
            if each not in gone and _is_hung(each, now):
                self._end(each)
                self._later(each)
        for each in gone:
            has_come = _has_come(each)
            why = self._end(each)
            self._later(each)
            if self._num_slots() < self._least:
                raise _cannot_reach(each.host.name, why)
            if why and not has_come:
                kept_away.append(_cannot_reach(each.host.name, why))
        return kept_away

    def _look_for_late(self) -> list[UserError]:
        """What to say of hosts of which nothing was heard for too long. Raises it where the run cannot begin so.

        A run that has begun waits for them: they may be hosts that were lost, and are on their way back.
        """
        self._has_begun |= sum(each.host.num_slots for each in self._started if _has_come(each)) >= self._least
        late = self._late(self._wait_seconds)
        if not late:
            return []
        silent = UserError(
            f"No agent came from {', '.join(late)} within {self._wait_seconds:g} s.",
            why=f"its machine does not answer, or {self._closed_ways()}",
            hint="let the machines of a run reach each other at all TCP ports from 1024 on, or name other hosts. If "
            "they are only slow, wait longer: `-o engine.wait=60`",
        )
        if self._has_begun:
            return [silent]
        raise silent

    def _late(self, seconds: float) -> list[str]:
        """Hosts whose command runs for longer than that, and has brought nobody."""
        now = time.monotonic()
        waited = [each for each in self._started if each.process is not None and now - each.since > seconds]
        return [each.host.name for each in waited if not _has_come(each)]

    def waiting_for(self, present: Collection[str]) -> str:
        waiting = [each.host.name for each in self._started if each.process is None] + self._late(COME_SECONDS)
        if not waiting:
            return "agents are starting"
        return f"no agent from {', '.join(waiting)} yet: its machine does not answer, or {self._closed_ways()}"

    def _closed_ways(self) -> str:
        port = self._invitation.port if self._invitation is not None else 0
        return (
            f"a firewall keeps it from {self.host}, port {port} (the launcher) or those of the command that starts it"
        )

    def replace(self, agent: str) -> None:
        each = next(each for each in self._started if str(each.order) == agent)
        if each.process is not None:  # else `look` has seen it, and has another come
            self._end(each)
            self._later(each)

    def close(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for each in filter(_has_come, self._started):  # a command that has brought nobody does not know of the end
            _wait(each, deadline)
        for each in self._started:
            if each.process is not None:
                each.process.terminate()
        deadline = time.monotonic() + TERM_SECONDS
        for each in self._started:
            _wait(each, deadline)
            self._end(each)
            each.due = 0.0

    def _num_slots(self) -> int:
        return sum(each.host.num_slots for each in self._started if each.process is not None)

    def _start(self, each: _Started) -> None:
        assert self._invitation is not None
        facts: dict[str, Any] = {
            **asdict(self._invitation),
            "name": str(each.order),
            "node": each.host.name,
            "num_slots": min(each.host.num_slots, self._num_wanted),
            "order": each.order,
        }
        each.errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            each.process = subprocess.Popen(
                self._command_of(each.host.name, AGENT),
                stdin=subprocess.PIPE,
                stdout=each.errors,
                stderr=each.errors,
                start_new_session=True,
            )
        except OSError as error:
            each.errors.close()
            self._later(each)
            raise _cannot_reach(each.host.name, f"{error.strerror}: {error.filename}") from error
        each.since, each.due = time.monotonic(), 0.0
        assert each.process.stdin is not None
        with contextlib.suppress(OSError):
            each.process.stdin.write(json.dumps(facts).encode() + b"\n")
            each.process.stdin.close()

    def _end(self, each: _Started) -> str:
        """End the command of a host; returns what it said."""
        if each.process is None or each.errors is None:
            return ""
        each.process.kill()
        each.process.wait()
        each.errors.seek(0)
        said = each.errors.read()[-MAX_ERROR_BYTES:].decode("utf-8", "replace").strip()
        each.errors.close()
        each.process = each.errors = None
        return first_words(said)

    def _later(self, each: _Started) -> None:
        now = time.monotonic()
        if now - each.since > LONGEST_PAUSE:  # it was there for a while: this is not the trouble of before
            each.pause = FIRST_PAUSE
        each.due = now + each.pause
        each.pause = min(LONGEST_PAUSE, 2 * each.pause)


def first_words(said: str) -> str:
    """What went wrong. After it mpirun writes pages about what that means, between lines of dashes. Pure."""
    parts = [part.strip() for part in re.split(r"^-{5,}$", said.replace(CONNECTED, ""), flags=re.MULTILINE)]
    return "\n".join(next(filter(None, parts), "").splitlines()[-8:])


def _has_come(each: _Started) -> bool:
    """Whether the command of a host has brought an agent."""
    return each.errors is not None and CONNECTED.encode() in os.pread(each.errors.fileno(), MAX_ERROR_BYTES, 0)


def _is_hung(each: _Started, now: float) -> bool:
    return each.process is not None and now - each.since > HUNG_SECONDS and not _has_come(each)


def _wait(each: _Started, deadline: float) -> None:
    """Wait until the command of a host has ended, but not for longer."""
    if each.process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(max(0.0, deadline - time.monotonic()))


def _cannot_reach(host: str, why: str) -> UserError:
    return UserError(
        f"No agent could be started on {host}.",
        why=why or "the command that was to start it ended without a word",
        hint="check that it is reached without a password, and that shoal is installed there in the same folder",
    )


def parse_hosts(text: str) -> list[Host]:
    """The value of `--hosts`: names with slots, such as `a:2,b:2`."""
    found = []
    for part in text.split(","):
        name, has_slots, slots = part.strip().partition(":")
        if not name or (has_slots and not (slots.isdecimal() and int(slots) > 0)):
            raise UserError(
                f"--hosts {text!r} is not a list of hosts.",
                why=f"{part!r} is not a name with a number of slots",
                hint="for example: `--hosts a:2,b:2`",
            )
        found.append(Host(name=name, num_slots=int(slots or 1)))
    if len({host.name for host in found}) < len(found):
        raise UserError(f"--hosts {text!r} names a host twice.", hint="name each once, with all of its slots")
    return found


def allocated_hosts(env: Mapping[str, str]) -> list[Host]:
    """The hosts of the Slurm allocation that this process is in, with a slot for each task; none outside of one."""
    names = host_names(env.get("SLURM_JOB_NODELIST", ""))
    counts = tasks_per_node(env.get("SLURM_TASKS_PER_NODE") or "1")
    return [Host(name=name, num_slots=counts[min(number, len(counts) - 1)]) for number, name in enumerate(names)]
