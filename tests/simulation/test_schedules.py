"""Ten thousand runs under seeded trouble: every promise holds in each, and a seed tells the same story twice."""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.simulation.mutants import MUTANTS, Trouble
from tests.simulation.schedule import draw_schedule
from tests.simulation.simulator import Simulation, Violation

CHUNK = 1_250
SEEDS_FOR_A_BUG = 1_200


def run_seeds(first: int, stop: int) -> Counter[str]:
    """Run every seed; how often which note was made."""
    seen: Counter[str] = Counter()
    for seed in range(first, stop):
        seen.update(note.kind for note in Simulation(draw_schedule(seed)).run().notes)
    return seen


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 8))])
def test_schedules(chunk):
    seen = run_seeds(chunk * CHUNK, (chunk + 1) * CHUNK)
    # The schedules are worth something only if all of this happens in them.
    for kind in ("world", "worker_lost", "worker_joined", "worker_frozen", "resized", "waiting_for_workers"):
        assert seen[kind] > 10, f"{kind} hardly ever happens"


def test_machines_go_and_come_back():
    """Nobody is started without a machine, and whoever was missed is there again in the end."""
    kinds = ("lose_room", "lose_room", "kill", "freeze", "resize")
    for seed in range(600):
        Simulation(draw_schedule(seed, kinds)).run()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(10))
def test_many_more_schedules(chunk):
    run_seeds(10_000 + chunk * 10_000, 20_000 + chunk * 10_000)


@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_a_seed_replays_identically(seed):
    first, second = (Simulation(draw_schedule(seed)).run() for _ in range(2))
    assert first.trace == second.trace
    assert first.notes == second.notes
    assert first.counter == second.counter


def first_violation(trouble: Trouble, seeds: Iterable[int]) -> tuple[int, str]:
    """The first seed that breaks a promise, and what the simulator says; an empty text if none does."""
    for seed in seeds:
        try:
            Simulation(draw_schedule(seed, trouble.kinds, trouble.remote_share)).run()
        except Violation as violation:
            return seed, str(violation)
    return -1, ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_planted_bugs_are_found(mutant, monkeypatch):
    mutant(monkeypatch)
    seed, found = first_violation(MUTANTS[mutant], range(SEEDS_FOR_A_BUG))
    assert found, f"{mutant.__doc__} Nobody noticed in {SEEDS_FOR_A_BUG} runs."
    assert first_violation(MUTANTS[mutant], [seed]) == (seed, found), "a failing seed fails in the same way again"
