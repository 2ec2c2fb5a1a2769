"""The door of a cluster: a process on the first machine that lets others in while an invitation is open.

`python -m shoal.cluster.door FOLDER FD`, FD being a socket that listens. It ends by itself with the last invitation,
so that nothing of ours stays behind when everybody is in. Whoever does not show to know a code is told nothing but
that, after a second, one at a time.
"""

import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from shoal.cluster.certificates import as_der, sign_request
from shoal.cluster.codes import prove
from shoal.cluster.files import read_private
from shoal.cluster.invitations import (
    Invitation,
    came_in,
    check_open,
    find_invitation,
    open_until,
    read_invitations,
    use,
)
from shoal.cluster.ports import Ports
from shoal.cluster.reach import listening, try_ports
from shoal.cluster.versions import versions_here
from shoal.cluster.wire import ANSWERED, ASKED, Broken, Lines, server_context
from shoal.engine.clusters import Cluster, read_cluster
from shoal.spec.errors import UserError

WRONG_SECONDS = 1.0
PATIENCE_SECONDS = 15.0
VISIT_SECONDS = 90.0
MAX_GUESTS = 8


class Door:
    """Answers guests, each in a thread of its own, until the last invitation has expired."""

    def __init__(self, cluster: Cluster, listener: socket.socket) -> None:
        self.cluster = cluster
        self._listener = listener
        self._context = server_context(cluster.path("node.pem"), cluster.path("node.key"))
        self._binding = as_der(read_private(cluster.folder, "node.pem"))
        self._room = threading.Semaphore(MAX_GUESTS)
        self._wrong = threading.Lock()

    def stand_open(self) -> None:
        self._listener.settimeout(1.0)
        while time.time() < open_until(self.cluster.folder):
            try:
                connection, peer = self._listener.accept()
            except OSError:
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._receive, args=(connection, str(peer[0])), daemon=True).start()

    def _receive(self, connection: socket.socket, address: str) -> None:
        # Whoever sends a letter a minute does not keep others out for long.
        enough = threading.Timer(VISIT_SECONDS, _hang_up, [connection])
        enough.daemon = True
        enough.start()
        try:
            connection.settimeout(PATIENCE_SECONDS)
            with self._context.wrap_socket(connection, server_side=True) as guest, ExitStack() as held:
                self._answer(Lines(guest), address, held)
        except (OSError, Broken, ssl.SSLError) as error:
            _log(f"{address}: {error}")
        finally:
            enough.cancel()
            connection.close()
            self._room.release()

    def _answer(self, lines: Lines, address: str, held: ExitStack) -> None:
        """Answer what a guest asks, for as long as it asks; `held` is what it has us keep open meanwhile."""
        while (said := lines.receive()) is not None:
            text, proof = said
            invitation = find_invitation(
                read_invitations(self.cluster.folder), proof, ASKED, self._binding, text.encode()
            )
            if invitation is None:
                with self._wrong:
                    time.sleep(WRONG_SECONDS)
                _log(f"{address}: refused, the code is wrong")
                lines.send("")
                return
            reply = json.dumps(self._reply(text, invitation, address, held))
            lines.send(reply, prove(invitation.secret, ANSWERED, self._binding, str(proof).encode(), reply.encode()))

    def _reply(self, text: str, invitation: Invitation, address: str, held: ExitStack) -> Mapping[str, Any]:
        try:
            check_open(invitation, address, time.time())
            request = json.loads(text)
            return {"answer": _VERBS[request["verb"]](self, request, invitation, address, held)}
        except UserError as error:
            _log(f"{address}: {error.message}")
            return {"error": {"message": error.message, "why": error.why, "hint": error.hint}}
        except (ValueError, KeyError, TypeError) as error:
            return {"error": {"message": f"The request cannot be read: {type(error).__name__}."}}

    def hello(self, _request: Any, _invitation: Invitation, address: str, _held: ExitStack) -> dict[str, Any]:
        """What a guest has to know before it decides to come in."""
        return {
            "versions": versions_here(),
            "time": time.time(),
            "you": address,
            "others": sorted(came_in(self.cluster.folder) - {address}),
            "name": self.cluster.name,
            "address": self.cluster.address,
            "port": self.cluster.port,
            "has_tls": self.cluster.has_tls,
        }

    def listen(self, _request: Any, _invitation: Invitation, _address: str, held: ExitStack) -> dict[str, Any]:
        """Listen where nobody does yet, and at some port of the system's choice, so that a guest can try them."""
        any_port = held.enter_context(listening([0]))
        held.enter_context(listening(Ports(self.cluster.port).between_machines))
        return {"any": any_port[0] if any_port else 0}

    def call_back(self, request: Any, _invitation: Invitation, address: str, _held: ExitStack) -> dict[str, Any]:
        """Try a guest's ports from here; only where it came from."""
        ports = [port for port in map(int, request["ports"]) if 0 < port < 65536][:16]
        return {"failed": {str(port): what for port, what in try_ports(address, ports).items()}}

    def admit(self, request: Any, invitation: Invitation, address: str, _held: ExitStack) -> dict[str, Any]:
        """Everything a machine needs to take part. From now on the code is used for it."""
        folder = self.cluster.folder
        ca = read_private(folder, "ca.pem")
        certificate = sign_request(str(request["request"]).encode(), address, ca, read_private(folder, "ca.key"))
        use(folder, invitation.secret, address, time.time())
        _log(f"{address}: let in")
        return {
            "certificate": certificate.decode(),
            "ca": ca.decode(),
            "token": read_private(folder, "token").decode(),
        }


_VERBS: dict[str, Callable[[Door, Any, Invitation, str, ExitStack], dict[str, Any]]] = {
    "hello": Door.hello,
    "listen": Door.listen,
    "call_back": Door.call_back,
    "admit": Door.admit,
}


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _log(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)


def main(folder: str, fd: int) -> None:
    cluster = read_cluster(folder)
    assert cluster is not None, "the door is opened once the cluster is written down"
    with socket.socket(fileno=fd) as listener:
        _log("open")
        Door(cluster, listener).stand_open()
    _log("closed: no invitation is open any more")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
