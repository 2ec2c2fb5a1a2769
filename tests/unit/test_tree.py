"""The fixed tree: any assignment of shards to workers goes through the same additions."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train import tree


@st.composite
def assignments(draw):
    num_leaves = draw(st.integers(1, 24))
    cuts = sorted(draw(st.lists(st.integers(0, num_leaves), max_size=6)))
    bounds = [0, *cuts, num_leaves]
    return num_leaves, [range(a, b) for a, b in pairwise(bounds)]


@given(assignments())
def test_cover_holds_exactly_the_leaves_asked_for(case):
    num_leaves, ranges = case
    for mine in ranges:
        nodes = tree.cover(mine.start, mine.stop, num_leaves) if mine else []
        assert [leaf for node in nodes for leaf in range(*node)] == list(mine)
        assert len(nodes) <= tree.most_nodes(num_leaves)


def run(additions, terms, values):
    registers = {}
    for register, left, right in additions:
        a, b = (registers[x] if isinstance(x, int) else values[x] for x in (left, right))
        registers[register] = a + b
    return registers[0] if additions else values[next(iter(terms.values()))]


def tree_sum(leaves, node):
    if node[1] - node[0] == 1:
        return leaves[node[0]]
    cut = tree.middle(node)
    return tree_sum(leaves, (node[0], cut)) + tree_sum(leaves, (cut, node[1]))


@given(assignments(), st.integers(0, 10**6))
def test_any_assignment_gives_the_same_float(case, seed):
    num_leaves, ranges = case
    rng = random.Random(seed)
    leaves = [rng.uniform(-1, 1) * 10 ** rng.uniform(-8, 8) for _ in range(num_leaves)]
    terms, values = {}, {}
    for rank, mine in enumerate(ranges):
        for slot, node in enumerate(tree.cover(mine.start, mine.stop, num_leaves) if mine else []):
            terms[node] = (rank, slot)
            values[(rank, slot)] = tree_sum(leaves, node)
    additions = tree.plan_additions(terms, num_leaves)
    assert run(additions, terms, values) == tree_sum(leaves, (0, num_leaves))
    assert max((register for register, *_ in additions), default=0) < tree.most_registers(num_leaves)


@given(st.integers(1, 40))
def test_parent_of_siblings_and_only_of_siblings(num_leaves):
    nodes = {(0, num_leaves)}
    pairs = {}
    open_nodes = [(0, num_leaves)]
    while open_nodes:
        node = open_nodes.pop()
        if node[1] - node[0] > 1:
            left, right = (node[0], tree.middle(node)), (tree.middle(node), node[1])
            pairs[(left, right)] = node
            nodes |= {left, right}
            open_nodes += [left, right]
    for left in nodes:
        for right in nodes:
            assert tree.parent_of(left, right, num_leaves) == pairs.get((left, right))


@pytest.mark.parametrize(("num_leaves", "most"), [(1, 1), (2, 1), (4, 2), (8, 4), (16, 6)])
def test_most_nodes(num_leaves, most):
    assert tree.most_nodes(num_leaves) == most
