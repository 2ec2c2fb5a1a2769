"""What a member reads off the Worlds it is told about. Pure; for the worker's side."""

from collections.abc import Sequence

from shoal.spec.world import World


def is_broken(current: World, newest: World) -> bool:
    """A step of `current` can no longer be completed: somebody in it is dead. Stop waiting, and enter `newest`.

    A World that only adds members, or lets some go, breaks nothing: steps go on until all have seen it.
    """
    remaining = {*newest.ids, *newest.leaving}
    return newest.generation > current.generation and not remaining.issuperset(current.ids)


def is_time_to_switch(current: World, seen: Sequence[int]) -> bool:
    """After this step everybody leaves `current`: all have said, within the step, that they saw a newer World.

    `seen` is the newest generation each member knew when it posted. All read the same numbers, so all switch alike.
    """
    return min(seen) > current.generation
