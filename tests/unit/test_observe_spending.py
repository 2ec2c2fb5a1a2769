"""Where all of the time of a run went: made-up steps and events in, parts out."""

import pytest
from observing import event, make_step

from shoal.observe.breakdown import break_down_turns
from shoal.observe.diagnose import diagnose
from shoal.observe.spending import NUM_PERIODS, PARTS, spend
from shoal.observe.turns import merge_turns

PARTS_OF_STEP = {"compute": 0.012, "communicate": 0.004, "wait": 0.002, "load": 0.001, "other": 0.001}


def steps_of(ends, **changes):
    return [make_step(step, time=end, **{**PARTS_OF_STEP, **changes}) for step, end in enumerate(ends)]


def test_without_steps_there_is_nothing():
    assert spend([], []) is None


def test_parts_add_up_also_over_time():
    ends = [1000.02 + 0.02 * step for step in range(100)]
    found = spend(merge_turns({0: steps_of(ends), 1: steps_of(ends, waited_for=0)}), [])
    assert found is not None
    assert sum(found.parts.values()) == pytest.approx(1.0)
    assert found.parts["compute"] == pytest.approx(0.6)
    assert found.parts["communicate"] == pytest.approx(0.2)
    assert found.wall_seconds == pytest.approx(2.0)
    assert found.waited_for == {0: pytest.approx(0.2)}
    assert len(found.periods) == NUM_PERIODS
    assert all(sum(period.parts.values()) == pytest.approx(1.0) for period in found.periods)
    assert sum(period.num_steps for period in found.periods) == 100
    assert {period.waited_for for period in found.periods} == {0}
    assert found.periods[0].own_seconds == {0: pytest.approx(0.014), 1: pytest.approx(0.014)}


def test_what_saving_holds_up_is_told_from_what_is_always_between_steps():
    # 10 ms between all steps, and half a second more where a checkpoint was saved before step 20.
    ends = [1000.0 + 0.03 * step + (0.5 if step >= 20 else 0.0) for step in range(40)]
    saved = event("checkpoint_saved", 1000.9, 0, 20, path="p", num_bytes=1, seconds=3.0)
    turns = merge_turns({0: steps_of(ends)})
    found = spend(turns, [saved])
    assert found is not None
    assert found.checkpoint_seconds == pytest.approx(0.5)
    assert found.parts["between"] * found.wall_seconds == pytest.approx(0.39, abs=0.01)
    assert found.num_checkpoints == 1
    kinds = {finding.kind for finding in diagnose(break_down_turns(turns), [], found)}
    assert "much_saving" in kinds


def test_a_change_of_the_world_is_recovering():
    ends = [1000.0 + 0.02 * step + (2.0 if step >= 30 else 0.0) for step in range(60)]
    changed = event("world", 1001.0, generation=1, members=["0.0"], joined=[])
    turns = merge_turns({0: steps_of(ends)}, [changed])
    found = spend(turns, [changed])
    assert found is not None
    assert found.recover_seconds == pytest.approx(2.0, abs=0.01)
    assert {"much_recovering"} <= {finding.kind for finding in diagnose(break_down_turns(turns), [], found)}
    assert set(found.parts) == set(PARTS)
