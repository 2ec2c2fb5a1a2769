"""The files are plain safetensors: the library reads ours, we read the library's."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.foreign import read_weights, write_weights
from shoal.checkpoint.layout import DTYPES, MAX_FILE_BYTES, TensorEntry, header, plan_files
from shoal.checkpoint.staging import Staging
from shoal.checkpoint.state import TORCH_DTYPES, State, describe, digest
from shoal.checkpoint.store import FolderStore


def tensor_of(dtype: str, shape: list[int], seed: int) -> torch.Tensor:
    """Random bits of a type: NaNs of every kind, denormals, infinities. Booleans have only two valid bytes."""
    generator = torch.Generator().manual_seed(seed)
    width = DTYPES[dtype][1]
    num_bytes = int(torch.Size(shape).numel()) * width
    high = 2 if dtype == "BOOL" else 256
    data = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return data.view(TORCH_DTYPES[dtype]).view(shape)


tensors = st.dictionaries(
    st.text(min_size=1, max_size=12).map("model/".__add__) | st.text(min_size=1, max_size=12),
    st.builds(
        tensor_of, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99)
    ),
    max_size=6,
)


@settings(max_examples=40)
@given(tensors, st.sampled_from([1, 64, MAX_FILE_BYTES]))
def test_any_state_comes_back_bit_for_bit(tmp_path_factory, tensors, max_file_bytes):
    folder = tmp_path_factory.mktemp("store")
    with FolderStore(folder, max_file_bytes=max_file_bytes) as store:
        store.save(State(step=1, tensors=tensors), wait=True)
        loaded = store.load()
    assert digest(loaded.state.tensors) == digest(tensors)
    by_library = {}
    for file in loaded.path.glob("*.safetensors"):
        by_library.update(safetensors.torch.load_file(file))
    assert digest(by_library) == digest(tensors)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_library_and_we_read_each_other(tmp_path: Path, dtype: str):
    weights = {"b": tensor_of(dtype, [3, 5], 1), "a": tensor_of(dtype, [], 2), "c": torch.zeros(1, dtype=torch.int64)}
    ours = write_weights(weights, tmp_path / "ours.safetensors")
    assert digest(safetensors.torch.load_file(ours)) == digest(weights)
    safetensors.torch.save_file(weights, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert digest(read_weights(tmp_path / "theirs.safetensors")) == digest(weights)


def test_our_bytes_are_the_library_s_bytes(tmp_path: Path):
    """Same order, same padding: with the same metadata the files are equal."""
    weights = {"z": torch.arange(3.0), "a": torch.ones(5, dtype=torch.uint8), "m": torch.ones(2, dtype=torch.int64)}
    ours = write_weights(weights, tmp_path / "ours")
    assert ours.read_bytes() == safetensors.torch.save(weights, metadata={"format": "pt"})


def entry(name: str, num_bytes: int, dtype: str = "U8") -> TensorEntry:
    return TensorEntry(name, dtype, (num_bytes // DTYPES[dtype][1],))


def test_files_are_cut_by_part_and_size_and_never_through_a_tensor():
    entries = [entry("model/a", 60), entry("model/b", 60), entry("model/c", 30), entry("model/huge", 500)]
    entries += [entry("optimizer/a", 8), entry("no part", 8), entry("Strange!/x", 8)]
    plans = plan_files(entries, max_file_bytes=100)
    assert {plan.name: [item.name for item in plan.tensors] for plan in plans} == {
        "model-00001.safetensors": ["model/a"],
        "model-00002.safetensors": ["model/b", "model/c"],
        "model-00003.safetensors": ["model/huge"],
        "optimizer-00001.safetensors": ["optimizer/a"],
        "tensors-00001.safetensors": ["Strange!/x", "no part"],
    }


def test_wide_types_come_first_so_that_every_tensor_is_aligned():
    (plan,) = plan_files([entry("a", 3), entry("b", 2, "F16"), entry("c", 4, "F32"), entry("d", 8, "I64")])
    assert [item.dtype for item in plan.tensors] == ["I64", "F32", "F16", "U8"]
    assert len(header(plan.tensors)) % 8 == 0


def test_the_staging_buffer_is_reused_and_let_go():
    staging = Staging()
    sizes = []
    for num_floats in (1000, 900, 1000, 100):
        tensors = {"a": torch.ones(num_floats)}
        plans = plan_files([describe(name, tensor) for name, tensor in tensors.items()])
        (data,) = staging.copy(plans, tensors)
        assert bytes(data) == tensors["a"].numpy().tobytes()
        sizes.append(len(staging._buffer))
    assert sizes == [4000, 4000, 4000, 400]


def test_no_memory_for_the_copy_is_said():
    with pytest.raises(MemoryError, match="no memory for a copy of"):
        Staging().copy(plan_files([entry("a", 1 << 50)]), {})
