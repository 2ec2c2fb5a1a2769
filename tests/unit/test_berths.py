"""Which worker goes where: pure, so that it can be asked about any number of machines."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.berths import Berth, Slot, choose, seats_of


def berth(
    agent: str, node: str, order: int = 0, num_slots: int = 1, address: str = "", gpus: tuple[str, ...] = ()
) -> Berth:
    return Berth(
        agent=agent,
        node=node,
        order=order,
        address=address or f"10.0.0.{order + 1}",
        interface="eth0",
        num_slots=num_slots,
        ports=tuple(range(1000, 1000 + 2 * num_slots)),
        cores=8,
        gpus=gpus,
    )


TWO = [berth("0", "a", 0, 2), berth("1", "b", 1, 2)]


@st.composite
def fleets(draw: st.DrawFn) -> list[Berth]:
    """Up to six agents on up to three nodes, in any order."""
    nodes = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    found = [
        berth(str(number), f"node{node}", draw(st.sampled_from((0, node))), draw(st.integers(1, 3)))
        for number, node in enumerate(nodes)
    ]
    return draw(st.permutations(found))


def num_slots(berths: Sequence[Berth]) -> int:
    return sum(each.num_slots for each in berths)


def test_ranks_lie_node_by_node() -> None:
    slots = choose([TWO[1], TWO[0]], [], range(3), {})
    assert [slots[rank].agent for rank in range(3)] == ["0", "0", "1"]


def test_a_rank_gets_its_old_slot_back() -> None:
    before = choose(TWO, [], range(4), {})
    left = [before[rank] for rank in (0, 2, 3)]
    assert choose(TWO, left, [1], before) == {1: before[1]}


def test_whoever_lost_its_machine_gets_another() -> None:
    before = choose(TWO, [], range(4), {})
    assert choose(TWO[:1], [before[0]], [2], before) == {2: Slot(agent="0", index=1)}


def test_two_that_had_the_same_slot_do_not_both_get_it() -> None:
    before = {0: Slot(agent="0", index=0), 1: Slot(agent="0", index=0)}
    assert choose(TWO, [], [0, 1], before) == {0: Slot(agent="0", index=0), 1: Slot(agent="0", index=1)}


def test_those_without_room_are_left_out() -> None:
    assert list(choose(TWO, [], range(6), {})) == [0, 1, 2, 3]
    assert choose([], [], [0], {}) == {}


@given(fleets(), st.data())
def test_nobody_shares_a_slot_and_no_slot_is_left_empty(berths: list[Berth], data: st.DataObject) -> None:
    everywhere = [Slot(agent=b.agent, index=index) for b in berths for index in range(b.num_slots)]
    taken = data.draw(st.lists(st.sampled_from(everywhere), unique=True))
    before = data.draw(st.dictionaries(st.integers(0, 9), st.sampled_from(everywhere)))
    ranks = data.draw(st.lists(st.integers(0, 9), unique=True))
    found = choose(berths, taken, ranks, before)
    assert len(found) == min(len(ranks), num_slots(berths) - len(taken))
    assert len({*found.values(), *taken}) == len(found) + len(taken)
    assert set(found.values()) <= set(everywhere)
    alone = Counter(before[rank] for rank in ranks if rank in before)
    for rank, slot in found.items():
        if rank in before and alone[before[rank]] == 1 and before[rank] not in taken:
            assert slot == before[rank]


@given(fleets(), st.integers(1, 12), st.booleans())
def test_what_workers_are_told_fits_together(berths: list[Berth], count: int, is_elastic: bool) -> None:
    slots = choose(berths, [], range(count), {})
    seats = seats_of(berths, slots, is_elastic=is_elastic)
    assert list(seats) == list(slots)
    by_node: dict[str, list[int]] = {}
    for seat in seats.values():
        by_node.setdefault(seat.node, []).append(seat.local_rank)
        assert seat.local_rank < seat.num_local
        assert seat.node_rank < seat.num_nodes
    assert all(len(set(ranks)) == len(ranks) for ranks in by_node.values())
    assert len({(seat.node, seat.node_rank) for seat in seats.values()}) == len(by_node)
    if is_elastic:
        assert {seat.num_nodes for seat in seats.values()} == {len({b.node for b in berths})}
    else:
        assert {node: sorted(ranks) for node, ranks in by_node.items()} == {
            node: list(range(len(ranks))) for node, ranks in by_node.items()
        }
        assert {seat.num_nodes for seat in seats.values()} == {len(by_node)}
        assert {(seat.node, seat.num_local) for seat in seats.values()} == {(n, len(r)) for n, r in by_node.items()}


def test_ports_are_those_of_the_slot() -> None:
    seats = seats_of(TWO, choose(TWO, [], range(4), {}), is_elastic=False)
    assert [(seat.address, seat.store_port, seat.worker_port) for seat in seats.values()] == [
        ("10.0.0.1", 1000, 1001),
        ("10.0.0.1", 1002, 1003),
        ("10.0.0.2", 1000, 1001),
        ("10.0.0.2", 1002, 1003),
    ]


def test_workers_of_one_machine_that_stay_there_meet_on_loopback() -> None:
    slots = choose(TWO, [], range(2), {})
    assert {seat.interface for seat in seats_of(TWO, slots, is_elastic=False).values()} == {"lo"}
    assert {seat.interface for seat in seats_of(TWO, slots, is_elastic=True).values()} == {"eth0"}


def test_several_agents_on_one_node_share_its_local_ranks() -> None:
    berths = [berth(str(number), "a") for number in range(3)]
    seats = seats_of(berths, choose(berths, [], range(3), {}), is_elastic=False)
    assert [(seat.local_rank, seat.num_local, seat.node_rank) for seat in seats.values()] == [
        (0, 3, 0),
        (1, 3, 0),
        (2, 3, 0),
    ]


def test_a_newcomer_does_not_get_the_local_rank_of_one_who_runs() -> None:
    """Agent 0 is gone and agent 2 has come to the same node: the worker of agent 1 still has local rank 1."""
    berths = [berth(name, "a") for name in ("0", "1")]
    slots = {0: Slot(agent="0", index=0), 1: Slot(agent="1", index=0)}
    seats = seats_of(berths, slots, is_elastic=True)
    assert seats[1].local_rank == 1
    berths = [berth(name, "a") for name in ("1", "2")]
    slots = {1: slots[1], 0: Slot(agent="2", index=0)}
    later = seats_of(berths, slots, is_elastic=True, held={1: seats[1]})
    assert later[1] == seats[1]
    assert later[0].local_rank == 0


def test_a_worker_finds_its_own_gpu_at_its_local_rank() -> None:
    berths = [berth(str(n), "a", gpus=(gpu,)) for n, gpu in enumerate("5203")] + [berth("4", "b", 1, gpus=("5",))]
    slots = choose(berths, [], range(5), {})
    seats = seats_of(berths, slots, is_elastic=False)
    own = {each.agent: each.gpus[0] for each in berths}
    for rank, seat in seats.items():
        assert seat.gpus[seat.local_rank] == own[slots[rank].agent]
        assert sorted(seat.gpus) == (["0", "2", "3", "5"] if seat.node == "a" else ["5"])


def test_an_agent_with_several_slots_or_gpus_is_left_alone() -> None:
    for each in (berth("0", "a", num_slots=2, gpus=("0", "1")), berth("0", "a", gpus=("0", "1")), berth("0", "a")):
        assert seats_of([each], choose([each], [], [0], {}), is_elastic=False)[0].gpus == ()
