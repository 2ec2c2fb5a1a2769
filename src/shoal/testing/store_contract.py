"""What every store promises, as tests. Subclass it and give it a fixture `open_store`.

    class TestFolderStore(StoreContract):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda: FolderStore(tmp_path / "checkpoints", keep=2)

`open_store()` opens the same store each time, one that keeps two checkpoints.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.checkpoint.fence import Stale
from shoal.checkpoint.state import State, digest
from shoal.checkpoint.store import Store
from shoal.spec.errors import UserError

OpenStore = Callable[[], Store]


def make_state(step: int, **facts: Any) -> State:
    """A small state whose every number depends on the step."""
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model/fc.weight": torch.randn(4, 3, generator=generator),
        "model/fc.bias": torch.randn(3, generator=generator).to(torch.bfloat16),
        "optimizer/fc.weight/exp_avg": torch.randn(4, 3, generator=generator),
        "optimizer/fc.weight/step": torch.tensor(float(step)),
    }
    return State(step=step, tensors=tensors, facts={"position": step * 512, "seed": 7, **facts})


def assert_same(found: State, expected: State) -> None:
    """Equal bit for bit: step, facts, names, types, shapes and values."""
    assert found.step == expected.step
    assert dict(found.facts) == dict(expected.facts)
    assert digest(found.tensors) == digest(expected.tensors)


class StoreContract:
    """Run by pytest in a subclass."""

    def test_what_was_saved_is_loaded(self, open_store: OpenStore) -> None:
        store = open_store()
        saving = store.save(make_state(5), wait=True)
        assert saving.is_durable
        assert saving.error is None
        loaded = store.load()
        assert_same(loaded.state, make_state(5))
        assert loaded.path == saving.path
        assert loaded.skipped == ()

    def test_a_store_opened_later_finds_it(self, open_store: OpenStore) -> None:
        store = open_store()
        store.save(make_state(1))
        store.close()
        assert_same(open_store().load().state, make_state(1))

    def test_the_caller_may_change_everything_once_save_returns(self, open_store: OpenStore) -> None:
        store, scheduler = open_store(), {"milestones": [1, 2]}
        state = make_state(3, scheduler=scheduler)
        saving = store.save(state)
        for tensor in state.tensors.values():
            tensor.fill_(-1)
        scheduler["milestones"].append(99)
        saving.wait()
        assert_same(store.load().state, make_state(3, scheduler={"milestones": [1, 2]}))

    def test_the_caller_owns_what_was_loaded(self, open_store: OpenStore) -> None:
        store = open_store()
        store.save(make_state(1), wait=True)
        for tensor in store.load().state.tensors.values():
            tensor.fill_(-1)
        assert_same(store.load().state, make_state(1))

    def test_no_save_is_dropped(self, open_store: OpenStore) -> None:
        store = open_store()
        savings = [store.save(make_state(step)) for step in range(1, 7)]
        store.close()
        assert all(saving.is_durable for saving in savings)
        assert [entry.step for entry in store.list()] == [6, 5]
        assert_same(store.load().state, make_state(6))

    def test_loading_waits_for_the_save_under_way(self, open_store: OpenStore) -> None:
        store = open_store()
        store.save(make_state(1))
        assert store.load().state.step == 1

    def test_the_newest_is_the_last_saved_not_the_largest_step(self, open_store: OpenStore) -> None:
        store = open_store()
        for step in (80, 90, 60):
            store.save(make_state(step), wait=True)
        assert store.load().state.step == 60
        assert [entry.step for entry in store.list()] == [60, 90]

    def test_a_step_saved_again_is_replaced(self, open_store: OpenStore) -> None:
        store = open_store()
        store.save(make_state(1), wait=True)
        for run in range(3):
            store.save(make_state(2, run=run), wait=True)
        assert [entry.step for entry in store.list()] == [2, 1]
        assert store.load().state.facts["run"] == 2
        assert store.load(2).state.facts["run"] == 2

    def test_a_step_can_be_asked_for(self, open_store: OpenStore) -> None:
        store = open_store()
        store.save(make_state(1), wait=True)
        store.save(make_state(2), wait=True)
        assert_same(store.load(1).state, make_state(1))
        with pytest.raises(UserError, match="step 7"):
            store.load(7)
        with pytest.raises(UserError, match="step 7"):
            store.verify(7)

    def test_an_empty_store_says_so(self, open_store: OpenStore) -> None:
        store = open_store()
        assert store.list() == ()
        with pytest.raises(UserError, match="no checkpoint"):
            store.load()

    def test_list_and_verify_find_nothing_wrong(self, open_store: OpenStore) -> None:
        store = open_store()
        store.save(make_state(1), wait=True)
        (entry,) = store.list()
        assert entry.problem == ""
        assert entry.num_bytes > 0
        assert store.verify(1) == entry

    def test_who_was_left_behind_cannot_save(self, open_store: OpenStore) -> None:
        old = open_store()
        old.save(make_state(1), wait=True)
        new = open_store()
        assert new.fence(1)
        refused = old.save(make_state(2), wait=True)
        assert not refused.is_durable
        assert isinstance(refused.error, Stale)
        assert_same(new.load().state, make_state(1))
        assert new.save(make_state(3), wait=True).is_durable
        assert_same(open_store().load().state, make_state(3))
        with pytest.raises(Stale):
            old.fence(0)

    def test_one_goes_on_through_generations(self, open_store: OpenStore) -> None:
        store = open_store()
        for generation in (1, 2, 7):
            assert store.fence(generation)
            assert store.save(make_state(generation), wait=True).is_durable
        assert [entry.step for entry in store.list()] == [7, 2]

    @pytest.mark.parametrize("step", [-1, True, 1.5])
    def test_a_step_that_is_none_is_refused(self, open_store: OpenStore, step: Any) -> None:
        with pytest.raises(UserError, match="not a step"):
            open_store().save(State(step=step, tensors={}))

    def test_what_can_never_be_saved_is_refused_and_named(self, open_store: OpenStore) -> None:
        store = open_store()
        with pytest.raises(UserError, match="model/sparse"):
            store.save(State(step=1, tensors={"model/sparse": torch.eye(2).to_sparse()}))
        with pytest.raises(UserError, match=r"facts\['a'\]\[0\]"):
            store.save(State(step=1, tensors={}, facts={"a": [object()]}))
        assert store.list() == ()
        assert store.save(make_state(2), wait=True).is_durable

    def test_a_state_without_tensors_can_be_saved(self, open_store: OpenStore) -> None:
        store = open_store()
        store.save(State(step=0, tensors={}, facts={"position": 0}), wait=True)
        assert_same(store.load().state, State(step=0, tensors={}, facts={"position": 0}))

    def test_tensors_of_every_layout_survive(self, open_store: OpenStore) -> None:
        base = torch.arange(24.0)
        tensors = {
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "transposed": base.view(4, 6).t(),
            "strided": base[::3],
            "expanded": torch.tensor([1.0]).expand(5),
            "tied a": base,
            "tied b": base,
            "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        }
        store = open_store()
        store.save(State(step=1, tensors=tensors), wait=True)
        found = store.load().state.tensors
        assert digest(found) == digest(tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
