"""Several hosts on one machine: network namespaces that are joined by a slow, lossy, breakable network."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shoal.spec.errors import UserError
from shoal.testing.rigs import leftovers
from shoal.testing.rigs.machine import RigMissing, call, call_each, require

DEVICE = "eth0"
MOST_HOSTS = 100
_RIG = "rigs.hosts"

# Programs for the kernel's packet filter, as `tc` reads them: the number of instructions, then each of them.
_DROP_ALL = "1,6 0 0 2"
_CUT, _LOSE = "1", "2"
"""Priorities of the two filters of a link."""


class Hosts:
    """Hosts 0 … count-1, each with a network of its own. Made by `hosts`.

    Everything else is shared: files, processes, cores. A program finds the others at `address(i)`, through the
    device `interface`.
    """

    interface = DEVICE

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._processes: list[subprocess.Popen[Any]] = []
        self._cut: set[int] = set()

    @property
    def count(self) -> int:
        return len(self.names)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """A command that runs another on this host; the process is the same."""
        return ["nsenter", f"--net={leftovers.NAMESPACES / self.names[host]}", *command]

    def run(self, host: int, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host to its end. `options` are those of `subprocess.run`."""
        return subprocess.run(self.command(host, command), **options)

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host; it is killed with the block. `options` are those of `subprocess.Popen`."""
        process = subprocess.Popen(self.command(host, command), **options)
        self._processes.append(process)
        return process

    def partition(self, host: int) -> None:
        """Cut a host off: packets vanish both ways, without a word to anyone, as in a broken switch."""
        if host in self._cut:
            return
        for direction in ("ingress", "egress"):
            self._filter(host, direction, _CUT, _DROP_ALL)
        self._cut.add(host)

    def heal(self, host: int) -> None:
        """Undo `partition` and `unplug`. Connections that have not given up go on."""
        call("ip", "-n", self.names[host], "link", "set", DEVICE, "up", rig=_RIG)
        if host not in self._cut:
            return
        for direction in ("ingress", "egress"):
            call_each([*self._tc(host, "filter", "delete"), direction, "prio", _CUT], rig=_RIG)
        self._cut.discard(host)

    def unplug(self, host: int) -> None:
        """Pull a host's cable: it knows at once that it has no network, the others hear nothing."""
        call("ip", "-n", self.names[host], "link", "set", DEVICE, "down", rig=_RIG)

    def shape(self, host: int, *, rate_mbit: float | None = None, loss: float = 0.0) -> None:
        """Bound what a host sends: so many million bits a second, and a part of its packets lost."""
        call(*self._tc(host, "qdisc", "delete"), "root", rig=_RIG, is_checked=False)
        if rate_mbit is not None:
            bucket = f"burst {max(16, int(rate_mbit * 2.5))}kb latency 50ms".split()
            rate = f"{int(rate_mbit * 1e6)}bit"
            call(*self._tc(host, "qdisc", "add"), "root", "tbf", "rate", rate, *bucket, rig=_RIG)
        call(*self._tc(host, "filter", "delete"), "egress", "prio", _LOSE, rig=_RIG, is_checked=False)
        if loss:
            self._filter(host, "egress", _LOSE, _lose(loss))

    def close(self) -> None:
        """End everything that was started here."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)

    def _tc(self, host: int, what: str, act: str) -> list[str]:
        return ["tc", "-n", self.names[host], what, act, "dev", DEVICE]

    def _filter(self, host: int, direction: str, priority: str, program: str) -> None:
        place = [direction, "prio", priority, "bpf", "direct-action", "bytecode", program]
        call(*self._tc(host, "filter", "add"), *place, rig=_RIG)


def _lose(loss: float) -> str:
    """A program that drops some packets: what is not IPv4 passes; so does it if a random word is above the bound.

    Other packets are those by which hosts find each other (ARP): losing one costs a second, and is another story.
    """
    protocol, random_word = 0xFFFFF000, 0xFFFFF000 + 56  # SKF_AD_OFF, with SKF_AD_PROTOCOL and SKF_AD_RANDOM
    bound = min(0xFFFFFFFF, int(loss * 2**32))
    return f"6,40 0 0 {protocol},21 0 3 {0x0800},32 0 0 {random_word},37 1 0 {bound},6 0 0 2,6 0 0 0"


@contextmanager
def hosts(
    count: int, *, rate_mbit: float | None = None, delay_seconds: float = 0.0, loss: float = 0.0
) -> Iterator[Hosts]:
    """Hosts on a network of their own; nothing they send leaves it. Gone when the block is left, processes too.

    `rate_mbit` bounds what each host sends, `delay_seconds` is one way, `loss` is the part of packets that get lost.
    With a delay every packet passes through a small program (compiled here with gcc), good for about a gigabit a
    second; without one the kernel does it all. Needs root and iproute2.
    """
    if not 1 <= count <= MOST_HOSTS or not 0 <= loss < 1 or delay_seconds < 0 or (rate_mbit or 1) <= 0:
        raise UserError(
            f"There cannot be {count} hosts with rate {rate_mbit}, delay {delay_seconds} and loss {loss}.",
            hint=f"1 to {MOST_HOSTS} hosts; a rate above 0, a delay of 0 or more, a loss from 0 to below 1",
        )
    require(_RIG, "root", "ip", "tc", "nsenter", "network namespaces")
    with ExitStack() as stack:
        folder = stack.enter_context(leftovers.rig_folder())
        names = [f"{folder.name}-{number}" for number in range(count)]
        for name in names:
            stack.callback(leftovers.remove_namespace, name)
            call("ip", "netns", "add", name, rig=_RIG)
            call("ip", "-n", name, "link", "set", "lo", "up", rig=_RIG)
        found = Hosts(names)
        if delay_seconds:
            stack.enter_context(_delayed(folder, names, delay_seconds))
        else:
            _join_by_switch(f"{folder.name}-switch", names, stack)
        for host, name in enumerate(names):
            _bring_up(name, found.address(host))
            if rate_mbit is not None or loss:
                found.shape(host, rate_mbit=rate_mbit, loss=loss)
        stack.callback(found.close)
        yield found


def _bring_up(name: str, address: str) -> None:
    call_each(
        ["ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE],
        ["ip", "-n", name, "link", "set", DEVICE, "up"],
        # A place for the filters of `partition` and `loss`.
        ["tc", "-n", name, "qdisc", "add", "dev", DEVICE, "clsact"],
        rig=_RIG,
    )


def _join_by_switch(switch: str, names: Sequence[str], stack: ExitStack) -> None:
    """A bridge in a namespace of its own, so that nothing of this shows up in the network of the machine."""
    stack.callback(leftovers.remove_namespace, switch)
    call("ip", "netns", "add", switch, rig=_RIG)
    call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0", rig=_RIG)
    call("ip", "-n", switch, "link", "set", "bridge", "up", rig=_RIG)
    for number, name in enumerate(names):
        port = f"port{number}"
        ends = ["name", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch]
        call("ip", "link", "add", *ends, rig=_RIG)
        call("ip", "-n", switch, "link", "set", port, "master", "bridge", "up", rig=_RIG)


@contextmanager
def _delayed(folder: Path, names: Sequence[str], delay_seconds: float) -> Iterator[None]:
    """Join hosts by a program that holds every packet back for a while."""
    require(f"{_RIG} with a delay", "gcc", "tun devices")
    program, source = folder / "delay", Path(__file__).with_name("delay.c")
    call("gcc", "-O2", "-o", str(program), str(source), rig=_RIG)
    paths = [str(leftovers.NAMESPACES / name) for name in names]
    command = [str(program), DEVICE, str(int(delay_seconds * 1e6)), *paths]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            told = process.communicate(timeout=10)[1]
            raise RigMissing(f"{_RIG} with a delay is not possible here.", why=told.strip())
        yield
    finally:
        process.kill()
        process.communicate()
