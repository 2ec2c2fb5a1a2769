"""Damaged and hostile checkpoints: each is skipped, with the file named and the reason; none is believed."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import read
from shoal.checkpoint.state import State
from shoal.checkpoint.store import FolderStore
from shoal.spec.errors import UserError

MODEL, OTHER, MANIFEST = "model-00001.safetensors", "model-00002.safetensors", "manifest.json"


def make_state(step: int) -> State:
    tensors = {f"model/{name}": torch.full((2048,), float(step) + i) for i, name in enumerate("ab")}
    return State(step=step, tensors=tensors, facts={"lr": 0.125, "seed": 7})


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    store = FolderStore(tmp_path / "checkpoints", max_file_bytes=8192)
    store.save(make_state(1), wait=True)
    store.save(make_state(2), wait=True)
    return store


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest's body and sign it again, as someone who means harm would."""
    envelope = json.loads((path / MANIFEST).read_bytes())
    body = envelope["body"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    envelope["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    del envelope["body"]
    (path / MANIFEST).write_text(json.dumps(envelope)[:-1] + ', "body": ' + text + "}")


def forge_file(**fields: Any) -> Callable[[Path], None]:
    return lambda path: forge(path, lambda body: body["files"][0].update(fields))


def forge_tensor(**fields: Any) -> Callable[[Path], None]:
    return lambda path: forge(path, lambda body: body["files"][0]["tensors"][0].update(fields))


def forge_body(**fields: Any) -> Callable[[Path], None]:
    return lambda path: forge(path, lambda body: body.update(fields))


def edit(file: str, change: Callable[[bytearray], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray((path / file).read_bytes())
        changed = change(data)
        (path / file).write_bytes(data if changed is None else changed)

    return damage


def flip(data: bytearray, position: int) -> None:
    data[position] ^= 4


def swap_shards(path: Path) -> None:
    (path / MODEL).rename(path / "x")
    (path / OTHER).rename(path / MODEL)
    (path / "x").rename(path / OTHER)


def zero_a_page(data: bytearray) -> None:
    data[4096:8192] = bytes(4096)


def take_from_older(path: Path) -> None:
    shutil.copy(path.parent / "step-000000001" / MODEL, path / MODEL)


def replace_by_link(path: Path) -> None:
    (path / MODEL).rename(path / "real")
    (path / MODEL).symlink_to("real")


def replace_by(make: Callable[[Path], Any], file: str = MODEL) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / file).unlink()
        make(path / file)

    return damage


def claim_a_petabyte(path: Path) -> None:
    """A sparse file that is really there, and a manifest that agrees with it."""
    size = 1 << 43
    os.truncate(path / MODEL, size)
    body = json.loads((path / MANIFEST).read_bytes())["body"]
    count = (size - body["files"][0]["data_start"]) // 4
    forge_tensor(shape=[count])(path)
    forge_file(size=size)(path)


def name_a_tensor_twice(path: Path) -> None:
    forge(path, lambda body: body["files"][1]["tensors"][0].update(name="model/a"))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    # what was done: (how, the file that must be named, part of the reason)
    "a file is missing": (lambda path: (path / OTHER).unlink(), OTHER, "is missing"),
    "a file is cut short": (edit(MODEL, lambda data: data[:-1]), MODEL, "bytes"),
    "a file is empty": (edit(MODEL, lambda data: b""), MODEL, "has 0 bytes"),
    "a file has grown": (edit(MODEL, lambda data: bytes(data) + b"x"), MODEL, "bytes"),
    "a bit of data is flipped": (edit(MODEL, lambda data: flip(data, -7)), MODEL, "bytes have changed"),
    "a bit of a header is flipped": (edit(OTHER, lambda data: flip(data, 20)), OTHER, "bytes have changed"),
    "a page is zero": (edit(MODEL, zero_a_page), MODEL, "bytes have changed"),
    "two files are swapped": (swap_shards, MODEL, "bytes have changed"),
    "a file is from an older checkpoint": (take_from_older, MODEL, "bytes have changed"),
    "a file is a link": (replace_by_link, MODEL, "is a link"),
    "a file is a pipe": (replace_by(os.mkfifo), MODEL, "not a plain file"),
    "a file is a folder": (replace_by(Path.mkdir), MODEL, "not a plain file"),
    "the manifest is missing": (lambda path: (path / MANIFEST).unlink(), MANIFEST, "is missing"),
    "the manifest is empty": (edit(MANIFEST, lambda data: b""), MANIFEST, "not a valid manifest"),
    "the manifest is cut short": (edit(MANIFEST, lambda data: data[:-9]), MANIFEST, "not a valid manifest"),
    "the manifest is not text": (edit(MANIFEST, lambda data: b"\xff\xfe" * 50), MANIFEST, "not a valid manifest"),
    "the manifest is a pipe": (replace_by(os.mkfifo, MANIFEST), MANIFEST, "not a plain file"),
    "a fact has changed": (edit(MANIFEST, lambda data: data.replace(b"0.125", b"0.625")), MANIFEST, "own sha256"),
    "the format is another": (edit(MANIFEST, lambda data: data.replace(b"shoal-", b"squid-")), MANIFEST, "format"),
    "the version is newer": (edit(MANIFEST, lambda data: data.replace(b'n":1', b'n":9')), MANIFEST, "version 9"),
    "the manifest has a gigabyte": (lambda path: os.truncate(path / MANIFEST, 1 << 30), MANIFEST, "at most"),
    "the manifest is nested without end": (edit(MANIFEST, lambda data: b"[" * 9_000_000), MANIFEST, "not a valid"),
    "the step is another": (forge_body(step=3), MANIFEST, "step 3"),
    "the step is text": (forge_body(step="2"), MANIFEST, "Expected `int`"),
    "the step is negative": (forge_body(step=-2), MANIFEST, ">= 0"),
    "facts are not a number": (
        edit(MANIFEST, lambda data: data.replace(b"0.125", b"NaN")),
        MANIFEST,
        "not a valid manifest",
    ),
    "facts are a list": (forge_body(facts=[1]), MANIFEST, "facts cannot be read"),
    "facts are of an unknown kind": (forge_body(facts={"a": {"$code": "x"}}), MANIFEST, "unknown kind"),
    "files are no list": (forge_body(files={}), MANIFEST, "Expected `array`"),
    "a path leads up": (forge_file(name="../step-000000001/" + MODEL), MANIFEST, "name"),
    "a path is absolute": (forge_file(name="/etc/passwd"), MANIFEST, "name"),
    "a path has a zero byte": (forge_file(name="model\0.safetensors"), MANIFEST, "name"),
    "a file is named twice": (forge_file(name=OTHER), MANIFEST, "twice"),
    "a size is absurd": (forge_file(size=1 << 62), MANIFEST, "size"),
    "a size is negative": (forge_file(size=-1), MANIFEST, "size"),
    "sizes do not add up": (forge_file(data_start=8), MANIFEST, "its tensors need"),
    "a digest is no digest": (forge_file(sha256="abc"), MANIFEST, "sha256"),
    "a digest is another's": (forge_file(sha256="0" * 64), MODEL, "bytes have changed"),
    "a tensor is named twice": (name_a_tensor_twice, MANIFEST, "twice"),
    "a type is unknown": (forge_tensor(dtype="F99"), MANIFEST, "unknown type"),
    "a shape is negative": (forge_tensor(shape=[-2048]), MANIFEST, "shape"),
    "a shape is absurd": (forge_tensor(shape=[1 << 47] * 60), MANIFEST, "its tensors need"),
    "a shape is text": (forge_tensor(shape="2048"), MANIFEST, "shape"),
    "a file claims more than any memory": (claim_a_petabyte, MANIFEST, "bytes of memory"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found_named_and_passed_over(store: FolderStore, what: str):
    damage, file, reason = DAMAGES[what]
    damage(store.folder / "step-000000002")
    loaded = store.load()
    assert loaded.state.step == 1
    (skipped,) = loaded.skipped
    assert skipped.path.name == "step-000000002"
    assert skipped.reason.startswith(file)
    assert reason in skipped.reason
    with pytest.raises(UserError, match="No usable checkpoint of step 2"):
        store.load(2)


@pytest.mark.parametrize("what", ["a bit of data is flipped", "a page is zero", "a file is missing"])
def test_verify_reads_every_byte(store: FolderStore, what: str):
    damage, file, reason = DAMAGES[what]
    damage(store.folder / "step-000000002")
    assert store.verify(1).problem == ""
    problem = store.verify(2).problem
    assert problem.startswith(file)
    assert reason in problem


def test_list_tells_what_is_wrong_without_reading_the_data(store: FolderStore):
    os.truncate(store.folder / "step-000000002" / MODEL, 10)
    newest, older = store.list()
    assert (newest.step, older.step) == (2, 1)
    assert newest.problem.startswith(MODEL)
    assert older.problem == ""


def test_any_flipped_bit_anywhere_is_found(store: FolderStore):
    path = store.folder / "step-000000002"
    chance = random.Random(5)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for _ in range(60):
            bad = bytearray(whole)
            bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
            file.write_bytes(bad)
            assert store.load().state.step == 1
        file.write_bytes(whole)
    assert store.load().state.step == 2


def test_none_usable_is_an_error_that_lists_each(store: FolderStore):
    (store.folder / "step-000000001" / MODEL).unlink()
    edit(OTHER, lambda data: flip(data, -1))(store.folder / "step-000000002")
    with pytest.raises(UserError, match="No usable checkpoint") as caught:
        store.load()
    assert "step-000000001: model-00001.safetensors: is missing" in caught.value.why
    assert "step-000000002: model-00002.safetensors: its bytes have changed" in caught.value.why
    assert caught.value.hint


def test_what_is_skipped_is_told(store: FolderStore):
    (store.folder / "step-000000002" / MODEL).unlink()
    told: list[tuple[str, Any]] = []
    FolderStore(store.folder, on_event=lambda kind, data: told.append((kind, data))).load()
    (event,) = told
    assert event[0] == "checkpoint_skipped"
    assert event[1]["path"].endswith("step-000000002")
    assert "is missing" in event[1]["reason"]


def test_a_part_is_read_without_the_rest(tmp_path: Path):
    store = FolderStore(tmp_path)
    tensors = {"model/a": torch.ones(2), "ema/a": torch.zeros(2)}
    path = store.save(State(step=1, tensors=tensors), wait=True) and store.load().path
    (path / "ema-00001.safetensors").write_bytes(b"x")
    assert set(read.read_state(path, "model").tensors) == {"model/a"}


def test_tensors_that_are_not_aligned_are_read(store: FolderStore):
    """Not how we write, but a valid file: one byte, then a float."""
    path = store.folder / "step-000000002"
    data = bytearray((path / MODEL).read_bytes())

    def change(body: dict[str, Any]) -> None:
        file = body["files"][0]
        tensors = [{"name": "byte", "dtype": "U8", "shape": [1]}, {"name": "model/a", "dtype": "F32", "shape": [2]}]
        content = b"\x07" + torch.tensor([1.5, 2.5]).numpy().tobytes()
        whole = bytes(data[: file["data_start"]]) + content
        (path / MODEL).write_bytes(whole)
        file.update(tensors=tensors, size=len(whole), sha256=hashlib.sha256(whole).hexdigest())

    forge(path, change)
    found = store.load().state.tensors
    assert found["byte"].tolist() == [7]
    assert found["model/a"].tolist() == [1.5, 2.5]
