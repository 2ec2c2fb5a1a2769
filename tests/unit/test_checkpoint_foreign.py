"""Weights from and to other formats."""

import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp

from shoal.checkpoint import dcp
from shoal.checkpoint.foreign import read_weights, write_weights
from shoal.checkpoint.state import State, digest
from shoal.checkpoint.store import FolderStore
from shoal.spec.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"fc.weight": torch.randn(3, 2), "fc.bias": torch.randn(3).to(torch.bfloat16), "count": torch.tensor(7)}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return make_weights()


class Runs:
    """An object whose pickle runs a command when it is read carelessly."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("format", ["safetensors", "state_dict", "dcp"])
def test_what_is_written_is_read(tmp_path, weights, format):
    path = write_weights(weights, tmp_path / "out" / "weights", format)
    if format == "safetensors":
        path = path.rename(path.with_suffix(".safetensors"))
    assert digest(read_weights(path)) == digest(weights)
    assert os.listdir(tmp_path / "out") == [path.name]


def test_torch_reads_what_is_written(tmp_path, weights):
    found = torch.load(write_weights(weights, tmp_path / "w.pt", "state_dict"), weights_only=True)
    assert digest(found) == digest(weights)
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    torch_dcp.load(target, checkpoint_id=write_weights(weights, tmp_path / "dcp", "dcp"), no_dist=True)
    assert digest(target) == digest(weights)


@pytest.mark.parametrize("format", ["safetensors", "state_dict", "dcp"])
def test_a_view_is_written_without_its_neighbours(tmp_path, format):
    path = write_weights({"a": torch.zeros(1_000_000)[:2]}, tmp_path / "w", format)
    files = [path] if path.is_file() else list(path.iterdir())
    assert sum(file.stat().st_size for file in files) < 10_000


def test_a_file_is_replaced_and_a_folder_is_not(tmp_path, weights):
    path = tmp_path / "w.safetensors"
    write_weights({"a": torch.ones(1)}, path)
    write_weights(weights, path)
    assert digest(read_weights(path)) == digest(weights)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="already there"):
        write_weights(weights, tmp_path / "folder", "dcp")


def test_a_failed_write_leaves_the_old_file(tmp_path, weights):
    path = write_weights(weights, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="'sparse'"):
        write_weights({"sparse": torch.eye(2).to_sparse()}, path)
    with pytest.raises(UserError, match="Cannot write weights to") as caught:
        write_weights(weights, path / "below" / "x")
    assert "ENOTDIR" in caught.value.why
    assert digest(read_weights(path)) == digest(weights)
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_an_unknown_format_names_the_known_ones(tmp_path, weights):
    with pytest.raises(UserError, match="'onnx'") as caught:
        write_weights(weights, tmp_path / "x", "onnx")
    assert "safetensors, state_dict, dcp" in caught.value.hint


def test_a_run_folder_a_checkpoint_folder_and_one_checkpoint(tmp_path, weights):
    tensors = {f"model/{name}": tensor for name, tensor in weights.items()}
    averaged = {name: tensor * 2 for name, tensor in weights.items()}
    tensors |= {f"ema/{name}": tensor for name, tensor in averaged.items()}
    with FolderStore(tmp_path / "checkpoints") as store:
        saving = store.save(State(step=1, tensors=tensors), wait=True)
    for path in (tmp_path, tmp_path / "checkpoints", saving.path):
        assert digest(read_weights(path)) == digest(weights)
        assert digest(read_weights(path, part="ema")) == digest(averaged)
    with pytest.raises(UserError, match="no weights"):
        read_weights(saving.path, part="optimizer")
    (saving.path / "model-00001.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="Cannot read weights") as caught:
        read_weights(saving.path)
    assert "model-00001.safetensors: has 1 bytes" in caught.value.why
    with pytest.raises(UserError, match="No usable checkpoint"):
        read_weights(tmp_path)


def make_hugging_face(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    shards = {f"model-0000{i}-of-00003.safetensors": [name] for i, name in enumerate(weights, start=1)}
    for file, names in shards.items():
        safetensors.torch.save_file({name: weights[name] for name in names}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, [name] in shards.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_sharded_hugging_face_folder(tmp_path, weights):
    folder = make_hugging_face(tmp_path / "hf", weights)
    assert digest(read_weights(folder)) == digest(weights)
    assert digest(read_weights(folder / "model.safetensors.index.json")) == digest(weights)
    (folder / "model.safetensors.index.json").unlink()
    assert digest(read_weights(folder)) == digest(weights)


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        ({"a": "../x.safetensors"}, "not in this folder"),
        ({"a": "/etc/passwd"}, "not in this folder"),
        ({"a": "none.safetensors"}, "none.safetensors: is missing"),
        ({"other": "model-00001-of-00003.safetensors"}, "has no tensor 'other'"),
        ([1], "Expected `object`"),
    ],
)
def test_an_index_that_lies(tmp_path, weights, weight_map, why):
    folder = make_hugging_face(tmp_path / "hf", weights)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match="Cannot read weights") as caught:
        read_weights(folder)
    assert why in caught.value.why


@pytest.mark.parametrize(
    "wrap",
    [
        lambda weights: weights,
        lambda weights: OrderedDict((f"module.{name}", tensor) for name, tensor in weights.items()),
        lambda weights: {f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
        lambda weights: {"epoch": 3, "state_dict": weights, "optimizer": {"state": {}}},
        lambda weights: {"model": weights, "rng": torch.ones(3)},
        lambda weights: {"model_state_dict": weights, "loss": 0.5},
        lambda weights: {**weights, "_extra_state": {"a": 1}},
    ],
)
def test_what_people_torch_save(tmp_path, weights, wrap):
    torch.save(wrap(weights), tmp_path / "w.pt")
    assert digest(read_weights(tmp_path / "w.pt")) == digest(weights)


def test_the_old_file_format_of_torch(tmp_path, weights):
    torch.save(weights, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert digest(read_weights(tmp_path / "w.pth")) == digest(weights)


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        ({"epoch": 3}, "holds no tensors; its keys are 'epoch'"),
        (torch.ones(2), "holds a Tensor, not a state_dict"),
        ([1, 2], "holds a list"),
    ],
)
def test_a_file_without_a_state_dict(tmp_path, saved, why):
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(UserError, match="Cannot read weights") as caught:
        read_weights(tmp_path / "w.pt")
    assert why in caught.value.why


def test_a_pickled_model_is_refused_and_not_run(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(UserError, match="without running code") as caught:
        read_weights(tmp_path / "model.pt")
    assert "torch.nn.modules.linear.Linear" in caught.value.why
    torch.save({"a": Runs(tmp_path / "mark")}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="without running code"):
        read_weights(tmp_path / "evil.pt")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"hello there, this is not a model", b"\x80" * 64])
def test_garbage_is_an_error_that_names_the_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"Cannot read weights from .*" + name):
        read_weights(tmp_path / name)


def test_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no weights at"):
        read_weights(tmp_path / "none.pt")
    with pytest.raises(UserError, match="no weights in") as caught:
        read_weights(tmp_path)
    assert "DCP" in caught.value.hint
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(UserError, match="no weights at"):
        read_weights(tmp_path / "pipe.pt")


def save_dcp(state: dict[str, object], folder: Path) -> Path:
    torch_dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    "nest",
    [
        lambda weights: weights,
        lambda weights: {"model": weights, "optimizer": {"state": {"x": torch.ones(1)}}, "epoch": 3},
        lambda weights: {"app": {"model": weights, "optim": {"lr": torch.ones(1)}}},
        lambda weights: {f"module.{name}": tensor for name, tensor in weights.items()},
    ],
)
def test_dcp_folders_as_people_save_them(tmp_path, weights, nest):
    assert digest(read_weights(save_dcp(nest(weights), tmp_path / "dcp"))) == digest(weights)


def test_dcp_names_match_those_of_torch(tmp_path, weights):
    """A flat state_dict keeps its names, also where a layer is called `model`."""
    flat = {f"model.{name}": tensor for name, tensor in weights.items()} | {"head.bias": torch.ones(1)}
    assert set(read_weights(save_dcp(flat, tmp_path / "dcp"))) == set(flat)


def test_a_dcp_tensor_in_pieces_is_put_together(tmp_path):
    whole = torch.arange(12.0).view(4, 3)
    folder = save_dcp({"a": whole, "b": whole[2:].clone()}, tmp_path / "dcp")
    (a,) = dcp._decode((folder / ".metadata").read_bytes())["a"].chunks
    (b,) = dcp._decode((folder / ".metadata").read_bytes())["b"].chunks
    halves = (
        dcp.Chunk(offsets=(2, 0), sizes=(2, 3), file=b.file, start=b.start, length=b.length),
        dcp.Chunk(offsets=(0, 0), sizes=(2, 3), file=b.file, start=b.start, length=b.length),
    )
    item = dcp.Sharded(path=("a",), shape=(4, 3), dtype=torch.float32, chunks=halves)
    assert torch.equal(dcp._read_tensor(folder, item), torch.cat([whole[2:], whole[2:]]))
    for bad in (halves[:1], (a, *halves), (dcp.Chunk(offsets=(3, 0), sizes=(2, 3), file=b.file, start=0, length=9),)):
        with pytest.raises(dcp.Damaged):
            dcp._read_tensor(folder, dcp.Sharded(path=("a",), shape=(4, 3), dtype=torch.float32, chunks=bad))


def test_dcp_metadata_that_runs_code_is_refused(tmp_path, weights):
    folder = save_dcp(weights, tmp_path / "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "mark")))
    with pytest.raises(UserError, match="Cannot read weights") as caught:
        read_weights(folder)
    assert "which no DCP checkpoint needs; it was not run" in caught.value.why
    assert not (tmp_path / "mark").exists()


def hostile_pickles(mark: str) -> dict[str, bytes]:
    command = b"(V" + mark.encode() + b"\n"
    return {
        "os.mkdir": b"cposix\nmkdir\n" + command + b"tR.",
        "builtins.eval": b"cbuiltins\neval\n(V__import__('os').mkdir('" + mark.encode() + b"')\ntR.",
        "getattr to code": b"cbuiltins\ngetattr\n(ctorch\nSize\nV__class__\ntR.",
        "a class of torch": b"ctorch.nn\nLinear\n(I1\nI1\ntR.",
        "torch.load": b"ctorch\nload\n" + command + b"tR.",
        "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0bSize.mro.__x\x93.",
        "setting a class attribute": b"ctorch\nfloat32\n(N(V__x__\nI1\nstdb.",
        "nothing": b"",
        "no pickle": b"hello",
        "a number": b"I5\n.",
        "cut short": b"\x80\x04\x95\xff",
        "a persistent id": b"Pabc\n.",
        "a gigantic bytearray": b"\x80\x05\x96" + (1 << 46).to_bytes(8, "little") + b"x.",
        "a gigantic memo": b"\x80\x02N" + b"r" + (0xFFFFFFFE).to_bytes(4, "little") + b".",
    }


@pytest.mark.parametrize("what", hostile_pickles("x"))
def test_hostile_dcp_metadata_does_nothing(tmp_path, weights, what):
    folder = save_dcp(weights, tmp_path / "dcp")
    (folder / ".metadata").write_bytes(hostile_pickles(str(tmp_path / "mark"))[what])
    with pytest.raises(UserError, match="Cannot read weights from"):
        read_weights(folder)
    assert not (tmp_path / "mark").exists()


def change_metadata(folder: Path, change) -> None:
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def set_all(**fields):
    def change(metadata):
        for info in metadata.storage_data.values():
            vars(info).update(fields)

    return change


def grow(metadata):
    for item in metadata.state_dict_metadata.values():
        item.size = torch.Size([1 << 50])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (set_all(relative_path="../../secret"), "not in this folder"),
        (set_all(relative_path="/etc/passwd"), "not in this folder"),
        (set_all(relative_path="gone.distcp"), "gone.distcp: is missing"),
        (set_all(offset=3), "cannot be read as tensors"),
        (set_all(length=-1), "are not sizes"),
        (set_all(transform_descriptors=["zstd"]), "compressed"),
        (lambda metadata: metadata.storage_data.clear(), "is not what DCP writes"),
        (grow, "bytes of memory"),
    ],
)
def test_dcp_metadata_that_lies(tmp_path, weights, change, why):
    folder = save_dcp(weights, tmp_path / "dcp")
    change_metadata(folder, change)
    with pytest.raises(UserError, match="Cannot read weights") as caught:
        read_weights(folder)
    assert why in caught.value.why
