"""What is worked out for one state is what numpy works out for many."""

import random

import numpy as np
import pytest

from shoal.place.cluster import Ask, Node
from shoal.place.fit import Finder
from shoal.place.mix import mix_of
from shoal.place.space import Space, count_in, need_of, state_after

GIB = 2**30


def drawn(seed):
    """Nodes that are full in different ways, and a finder for needs of all sorts."""
    dice = random.Random(seed)
    asks = [
        Ask(
            cores=dice.choice((0.0, 0.5, 2.0, 7.0)),
            memory_bytes=dice.choice((0, 3 * GIB, 16 * GIB)),
            gpus=dice.choice((0.0, 0.0, 0.25, 0.3, 0.5, 0.8, 1.0, 2.0, 4.0)),
            disk_bytes=dice.choice((0, 0, GIB)),
            kinds=frozenset(dice.choice(((), (), ("a",), ("b",)))),
        )
        for _ in range(12)
    ]
    nodes = [
        Node(
            name=f"n{at}",
            kind=dice.choice("ab"),
            cores=dice.choice((4.0, 16.0, 64.0)),
            memory_bytes=dice.choice((16, 256)) * GIB,
            gpus=dice.choice((0, 1, 4, 8)),
            disk_bytes=dice.choice((0, 8 * GIB)),
        )
        for at in range(40)
    ]
    needs = [need_of(ask) for ask in asks]
    space = Space(nodes)
    for at in range(len(nodes)):
        for _ in range(dice.randrange(6)):
            need = dice.choice(needs)
            # Also what has no room: a node can be made smaller under what runs on it.
            if count_in(space.state(at), need) or (not need.gpu and dice.random() < 0.2):
                space.take(at, need, 1, space.pick_devices(at, need, 1))
    counts = {need: dice.randint(1, 50) for need in needs}
    return Finder(space, mix_of(counts, nodes, space.kinds)), needs


@pytest.mark.parametrize("seed", range(5))
def test_one_state_is_as_good_as_numpy_says(seed):
    finder, needs = drawn(seed)
    space = finder.space
    states, table = [space.state(at) for at in range(len(space.nodes))], space.table()
    for need in needs:
        counts = table.counts(need, slice(None))
        assert [count_in(state, need) for state in states] == counts.tolist()
        able = np.flatnonzero(counts)
        after = table.rooms_after(need, able)
        gpus = np.sort(after.gpu, axis=1).tolist()
        rows = zip(after.kind.tolist(), after.cores.tolist(), after.memory.tolist(), after.disk.tolist(), strict=True)
        expected = [(*row, *devices) for row, devices in zip(rows, gpus, strict=True)]
        assert [state_after(states[at], need) for at in able] == expected
        scores = [finder.score_in(need, states[at]) for at in able]
        assert scores == pytest.approx(finder.score(need, table, able).tolist(), abs=1.1e-12)
        if finder.mix is not None:
            lost = [finder.mix.lost_in(state) for state in states]
            assert lost == pytest.approx(finder.mix.lost(table.rooms(slice(None))).tolist())


@pytest.mark.parametrize("seed", range(5))
def test_rows_follow_what_changes(seed):
    finder, needs = drawn(seed)
    dice, space, zone = random.Random(seed), finder.space, frozenset({"default"})
    for _ in range(60):
        need, at = dice.choice(needs), dice.randrange(len(space.nodes))
        if count_in(space.state(at), need):
            space.take(at, need, 1, space.pick_devices(at, need, 1))
        other = dice.choice(needs)
        row = finder.row(other, zone)
        expected = np.where(finder.mask(other.kinds, zone), space.table().counts(other, slice(None)), 0)
        assert row.counts.tolist() == expected.tolist()
        assert row.total == expected.sum()
        assert not finder.has_room(other, row.total + 1, zone)
        assert not row.total or finder.has_room(other, row.total, zone)
