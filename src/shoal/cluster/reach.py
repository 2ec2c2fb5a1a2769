"""Can these machines reach each other? Addresses, ports, and who is in the way."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

from shoal.engine.ways import TRY_SECONDS, try_places
from shoal.spec.errors import UserError

_SIOCGIFADDR = 0x8915
_LISTENING = "0A"


def addresses_here() -> dict[str, str]:
    """This machine's IPv4 addresses with the device of each; those of the loopback are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, device in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
                address = socket.inet_ntoa(reply[20:24])
                if not address.startswith("127."):
                    found[address] = device
    return found


def choose_address(asked: str | None) -> str:
    """The address at which others find this machine: the one asked for, else that of the route to the world."""
    here = addresses_here()
    if asked is not None:
        if asked not in here and not asked.startswith("127."):
            told = ", ".join(f"{address} ({device})" for address, device in here.items()) or "none"
            raise UserError(f"This machine has no address {asked}.", why=f"it has: {told}", hint="name one of them")
        return asked
    if not here:
        raise UserError(
            "This machine has no address that others could reach.",
            why="its only network device is the loopback",
            hint="connect it to a network; or, to try things out alone, give `--address 127.0.0.1`",
        )
    routed = _address_of_default_route()
    return routed if routed in here else next(iter(here))


def _address_of_default_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        # Nothing is sent: the kernel only looks up the route. The address is one of those kept for documentation.
        asked.connect(("192.0.2.1", 9))
        return str(asked.getsockname()[0])
    return ""


def resolve(host: str) -> str:
    """The IPv4 address of a host."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "that cannot be the name of a host"
        raise UserError(
            f"There is no host {host!r}.",
            why=f"its name does not lead to an IPv4 address: {reason or error}",
            hint="use the address that `shoal up --cluster` printed on the first machine",
        ) from None
    return str(found[0][4][0])


def connect(address: str, port: int, timeout_seconds: float, otherwise: str) -> socket.socket:
    """A connection; where there is none, UserError says why. `otherwise` is what to do if it was refused."""
    try:
        return socket.create_connection((address, port), timeout_seconds)
    except TimeoutError:
        raise UserError(
            f"{address} does not answer at port {port}.",
            why=f"nothing came back within {timeout_seconds:.0f} s: it is off, or a firewall drops what we send",
            hint=f"see that {address} is on and lets TCP port {port} in",
        ) from None
    except ConnectionRefusedError:
        raise UserError(
            f"{address} refuses connections to port {port}.", why="nobody listens there", hint=otherwise
        ) from None
    except OSError as error:
        raise UserError(
            f"{address} cannot be reached.", why=error.strerror or str(error), hint="look at the network between us"
        ) from None


def try_ports(address: str, ports: Iterable[int], timeout_seconds: float = TRY_SECONDS) -> dict[int, str]:
    """Connect to ports at once; returns what was wrong with each that could not be reached."""
    told = try_places([(address, port) for port in ports], timeout_seconds)
    return {port: what for (_, port), what in told.items()}


@contextlib.contextmanager
def listening(ports: Iterable[int]) -> Iterator[list[int]]:
    """Listen at ports while the block lasts, so that others can try them; 0 is any. Yields those that were free.

    Nobody accepts: a connection is made as soon as the kernel has it.
    """
    with ExitStack() as stack:
        taken = []
        for port in ports:
            with contextlib.suppress(OSError):
                listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("", port))
                listener.listen(16)
                taken.append(int(listener.getsockname()[1]))
        yield taken


def is_free(port: int) -> bool:
    """Whether a port can be listened at, on all addresses."""
    with listening([port]) as free:
        return bool(free)


def check_free(ports: Mapping[int, str], hint: str) -> None:
    """Raise UserError where a port is taken, with who has it."""
    taken = {port: what for port, what in ports.items() if not is_free(port)}
    if taken:
        told = "; ".join(f"{port} ({what}) by {who_listens(port)}" for port, what in taken.items())
        several = "Ports are" if len(taken) > 1 else "A port is"
        raise UserError(f"{several} in use on this machine: {', '.join(map(str, taken))}.", why=told, hint=hint)


def who_listens(port: int) -> str:
    """The process that listens at a port, as far as we may see."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            links = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
            if any(link in sockets for link in links):
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                    return f"{file.read().strip()} (pid {pid})"
    return "a process of another user" if sockets else "an unknown process"


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            for line in file.read().splitlines()[1:]:
                row = line.split()
                if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                    yield row[9]
