"""A fixed tree over the shards of a step, so that a sum of floats does not depend on who computed what.

Float addition is commutative but not associative: the result depends on the grouping. Here the grouping is a
property of the step, a balanced binary tree over its shards. A worker that holds a run of neighbouring shards adds
up every subtree that lies wholly inside its run; whoever finishes the sum adds the subtrees along the same tree.
Every element then goes through the same additions, for any number of workers and any assignment.
"""

import math
from collections.abc import Mapping

Node = tuple[int, int]
"""The shards [first, last) below a point of the tree."""

Source = tuple[int, int]
"""Where a term is kept: (rank, slot)."""

Operand = Source | int
"""A term, or the number of a register that holds an intermediate sum."""

Addition = tuple[int, Operand, Operand]
"""Put the sum of two operands into a register."""


def middle(node: Node) -> int:
    """Where a node is cut into its two children."""
    return (node[0] + node[1]) // 2


def cover(first: int, last: int, num_leaves: int) -> list[Node]:
    """The fewest nodes that together hold exactly the leaves [first, last), from left to right."""

    def walk(node: Node) -> list[Node]:
        if node[1] <= first or last <= node[0]:
            return []
        if first <= node[0] and node[1] <= last:
            return [node]
        cut = middle(node)
        return walk((node[0], cut)) + walk((cut, node[1]))

    return walk((0, num_leaves))


def parent_of(left: Node, right: Node, num_leaves: int) -> Node | None:
    """The node whose two children these are, or None where they are not siblings."""
    if left[1] != right[0]:
        return None
    joined = (left[0], right[1])
    node = (0, num_leaves)
    while node != joined:
        cut = middle(node)
        if joined[1] <= cut:
            node = (node[0], cut)
        elif joined[0] >= cut:
            node = (cut, node[1])
        else:
            return None
    return joined if middle(joined) == left[1] else None


def plan_additions(terms: Mapping[Node, Source], num_leaves: int) -> list[Addition]:
    """The additions that combine terms covering all leaves, along the tree, ending in register 0.

    A single term needs none. Registers are reused as soon as they can be, so two or three are enough.
    """
    additions: list[Addition] = []
    free: list[int] = []
    used = 0

    def add(left: Operand, right: Operand) -> int:
        nonlocal used
        held = sorted(x for x in (left, right) if isinstance(x, int))
        if not held:
            held = [free.pop(0)] if free else [(used := used + 1) - 1]
        free.extend(held[1:])
        free.sort()
        additions.append((held[0], left, right))
        return held[0]

    def walk(node: Node) -> Operand:
        if node in terms:
            return terms[node]
        cut = middle(node)
        return add(walk((node[0], cut)), walk((cut, node[1])))

    walk((0, num_leaves))
    return additions


def most_nodes(num_leaves: int) -> int:
    """The largest number of nodes any run of neighbouring leaves needs."""
    return max(
        len(cover(first, last, num_leaves))
        for first in range(num_leaves)
        for last in range(first + 1, num_leaves + 1)
    )


def most_registers(num_leaves: int) -> int:
    """The largest number of registers any sum over so many leaves needs: one for each level below the root."""
    return max(1, math.ceil(math.log2(max(2, num_leaves))))
