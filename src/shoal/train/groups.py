"""Whom a worker talks to in a World: everybody, the other copies, and the other parts of its own copy."""

from dataclasses import dataclass

from shoal.comm.connect import connect_devices
from shoal.comm.group import Group
from shoal.comm.rendezvous import Rendezvous
from shoal.train.mesh import Seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`everyone` who trains; `copies`: those who hold the same part of the model; `parts`: those of the same copy.

    Where every worker holds a whole model, `copies` are all and `parts` nobody.
    """

    everyone: Group
    copies: Group
    parts: Group | None = None

    def close(self) -> None:
        for group in (self.everyone, self.copies, self.parts):
            if group is not None:
                group.close()


def connect_seats(meeting: Rendezvous, seats: Seats, transport: str, device: str) -> Groups:
    """Meet those who have seats. Only they call this, all together; `meeting` is of all members of the World.

    `device` is where our tensors are: "cpu" or "cuda".
    """
    mesh, members = seats.mesh, seats.members
    everyone = connect_devices(meeting.among("seats", members), transport, device)
    if mesh.num_parts == 1:
        return Groups(everyone=everyone, copies=everyone)
    seat = members.index(meeting.rank)
    part, copy = mesh.part_of(seat), mesh.copy_of(seat)
    try:
        copies = connect_devices(_some(meeting, seats, f"part-{part}", mesh.with_part(part)), transport, device)
        return Groups(
            everyone=everyone,
            copies=copies,
            parts=connect_devices(_some(meeting, seats, f"copy-{copy}", mesh.with_copy(copy)), transport, device),
        )
    except BaseException:
        everyone.close()
        raise


def _some(meeting: Rendezvous, seats: Seats, name: str, ranks: tuple[int, ...]) -> Rendezvous:
    return meeting.among(name, [seats.members[rank] for rank in ranks])
