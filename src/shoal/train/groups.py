"""Whom a worker talks to in a World: everybody, the other copies, and the other parts of its own copy."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.comm.clocked import Clock, Clocked
from shoal.comm.connect import connect_devices
from shoal.comm.group import Group
from shoal.comm.rendezvous import Rendezvous
from shoal.train.mesh import Seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`everyone` who trains; `copies`: those who hold the same part of the model; `parts`: those of the same copy.

    Where every worker holds a whole model, `copies` are all and `parts` nobody. Parts are `stages`, or `slices` of
    layers, or both: then `stages` are those with the same slice of each, and `slices` those of the same stage.
    `clock` knows how long we were held up by any of these.
    """

    everyone: Group
    copies: Group
    parts: Group | None = None
    stages: Group | None = None
    slices: Group | None = None
    clock: Clock = field(default_factory=Clock)

    def close(self) -> None:
        for group in (self.everyone, self.copies, self.parts, self.stages, self.slices):
            if group is not None:
                group.close()


def connect_seats(
    meeting: Rendezvous,
    seats: Seats,
    transport: str,
    device: str,
    before: Groups | None = None,
    workers: Sequence[int] | None = None,
) -> Groups:
    """Meet those who have seats. Only they call this, all together; `meeting` is of all members of the World.

    `device` is where our tensors are: "cpu" or "cuda". `before` are our groups in the World before, if we were there.
    `workers` are the numbers of its members, where these are not their positions.
    """
    mesh, seat = seats.mesh, seats.members.index(meeting.rank)
    made: list[Group] = []
    clock = Clock()

    def connect(name: str, ranks: Sequence[int], replaced: Group | None = None) -> Group:
        among = meeting.among(name, [seats.members[rank] for rank in ranks])
        made.append(connect_devices(among, transport, device, replaced))
        return made[-1]

    def connect_parts(name: str, ranks: Sequence[int]) -> Group:
        positions = [seats.members[rank] for rank in ranks]
        return Clocked(connect(name, ranks), clock, [workers[at] for at in positions] if workers else positions)

    try:
        everyone = connect("seats", range(len(seats.members)), before.everyone if before is not None else None)
        if mesh.num_parts == 1:
            return Groups(everyone=everyone, copies=everyone)
        copies = connect(f"part-{mesh.part_of(seat)}", mesh.with_part(mesh.part_of(seat)))
        parts = connect_parts(f"copy-{mesh.copy_of(seat)}", mesh.with_copy(mesh.copy_of(seat)))
        stages, slices = parts, parts
        if 1 < mesh.num_slices < mesh.num_parts:
            same_slice, same_stage = mesh.with_slice(seat), mesh.with_stage(seat)
            stages = connect_parts(f"slice-of-{same_slice[0]}", same_slice)
            slices = connect_parts(f"stage-of-{same_stage[0]}", same_stage)
        return Groups(everyone=everyone, copies=copies, parts=parts, stages=stages, slices=slices, clock=clock)
    except BaseException:
        for group in made:
            group.close()
        raise
