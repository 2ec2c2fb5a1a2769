"""What a machine that joins says at the door of the first one, and what it finds out before it comes in."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from shoal.cluster.codes import Code, fingerprint_of, is_proof, prove
from shoal.cluster.ports import Ports
from shoal.cluster.reach import connect, listening, try_ports
from shoal.cluster.wire import ANSWERED, ASKED, Broken, Lines, guest_tls
from shoal.spec.errors import UserError

CONNECT_SECONDS = 8.0
ANSWER_SECONDS = 20.0


class Visit:
    """A conversation with the door of a head. Nothing is believed that does not show to know the code."""

    def __init__(self, address: str, port: int, code: Code) -> None:
        self.address = address
        self._code = code
        closed = "run `shoal up --cluster --invite` on that machine: its door is open for ten minutes at a time"
        connection = connect(address, port, CONNECT_SECONDS, closed)
        try:
            connection.settimeout(ANSWER_SECONDS)
            self.here = str(connection.getsockname()[0])
            self._tls = guest_tls(connection)
        except OSError as error:
            connection.close()
            raise UserError(
                f"Whatever listens at {address}:{port} is not the door of a cluster.",
                why=f"it does not speak TLS 1.3: {error.strerror or error}",
                hint="`shoal up --cluster` printed the address and the port",
            ) from None
        self._lines = Lines(self._tls)
        self._binding = self._tls.getpeercert(binary_form=True) or b""
        if fingerprint_of(self._binding) != code.fingerprint:
            self.close()
            raise UserError(
                f"{address}:{port} is not the machine that made this code, or somebody sits in between.",
                why="its certificate is not the one that the code stands for; nothing was said to it",
                hint="compare address and code with what `shoal up --cluster` printed, or ask for a new code",
            )

    def ask(self, verb: str, **facts: Any) -> dict[str, Any]:
        """Ask for something; raises UserError where it is refused, or where the answer is not from the head."""
        text = json.dumps({"verb": verb, **facts})
        proof = prove(self._code.secret, ASKED, self._binding, text.encode())
        try:
            self._lines.send(text, proof)
            said = self._lines.receive()
        except Broken as error:
            raise UserError(f"The connection to {self.address} broke.", why=str(error), hint="try again") from None
        if said is None:
            raise UserError(
                f"{self.address} hung up.",
                why="it is not the door of a cluster, or has too many guests",
                hint="look at the port; try again",
            )
        reply, shown = said
        if not is_proof(shown, self._code.secret, ANSWERED, self._binding, proof.encode(), reply.encode()):
            raise UserError(
                "The code is wrong.",
                why=f"{self.address} does not know it",
                hint="`shoal up --cluster --invite` on the first machine makes a new one",
            )
        answer = json.loads(reply)
        if "error" in answer:
            raise UserError(**answer["error"])
        return dict(answer["answer"])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._tls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hello(visit: Visit) -> tuple[dict[str, Any], float]:
    """What the head says of itself, and by how many seconds its clock is ahead of ours."""
    asked = time.time()
    head = visit.ask("hello")
    answered = time.time()
    if head["you"] != visit.here:
        raise UserError(
            f"This machine is {visit.here} here, but {visit.address} sees it as {head['you']}.",
            why="something between us translates addresses (NAT, a container's network), and Ray cannot work so",
            hint="put both into one network: a VPN such as WireGuard, or the host's network for the container",
        )
    return head, float(head["time"]) - (asked + answered) / 2


def probe(visit: Visit, ports: Ports) -> str:
    """Try the ports of both machines from the other one, within ten seconds; raises UserError with what is blocked.

    Returns a warning where only ports are blocked that Ray itself does not need.
    """
    with listening([*ports.between_machines, 0]) as ours:
        any_here = next((port for port in ours if port not in ports.between_machines), 0)
        called = visit.ask("call_back", ports=ours)["failed"]
        inwards = {int(port): str(what) for port, what in called.items()}
    any_there = int(visit.ask("listen")["any"])
    there = {ports.gcs: "Ray's head", **ports.between_machines}
    outwards = try_ports(visit.address, [*there, any_there])
    named = {**there, any_here: "any other", any_there: "any other"}
    blocked = [
        *_told(visit.here, visit.address, outwards, named),
        *_told(visit.address, visit.here, inwards, named),
    ]
    if set(outwards) - {any_there} or set(inwards) - {any_here}:
        raise UserError(
            "The machines cannot reach each other as Ray needs it.",
            why="; ".join(blocked),
            hint=f"let TCP ports {ports.first}-{ports.workers[-1]} through between them, both ways",
        )
    return "; ".join(blocked)


def try_others(others: Sequence[str], ports: Ports) -> list[str]:
    """Warnings about machines that came in before and drop what we send. One that refuses has left, or is down."""
    warnings = []
    for address in others:
        failed = try_ports(address, [ports.node_manager, ports.object_manager])
        silent = [str(port) for port, what in failed.items() if "no answer" in what]
        if silent:
            warnings.append(f"{address}, which came in before, does not answer at port {' and '.join(silent)}")
    return warnings


def _told(start: str, end: str, failed: Mapping[int, str], named: Mapping[int, str]) -> list[str]:
    return [f"from {start} to {end} port {port} ({named[port]}): {what}" for port, what in failed.items()]
