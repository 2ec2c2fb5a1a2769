"""Damage to the files of a checkpoint, drawn from a seed: what disks, cables, people and attackers do.

`corrupt(folder, chance, older)` works on any folder of files, so that other formats can be tried in the same way.
`forge(folder, chance)` writes manifests of shoal that are signed like real ones and lie.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.state import State

PAGE = 4096
MANIFEST = "manifest.json"


def sample_state(step: int) -> State:
    """A state of a few pages in which no two pages are alike, so that every damage changes something."""
    generator = torch.Generator().manual_seed(step)
    tensors = {f"model/{name}": torch.randn(2500, generator=generator) for name in "abc"}
    tensors["optimizer/a"] = torch.randn(40, generator=generator)
    return State(step=step, tensors=tensors, facts={"position": step * 512, "milestones": (1, 2)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What was done. `files` are those a reader may name: one, or two that were swapped."""

    kind: str
    files: tuple[str, ...]


def corrupt(folder: Path, chance: random.Random, older: Path | None = None) -> Damage:
    """Damage one checkpoint in one way; something in it differs afterwards. `older` is another one to take from."""
    before = snapshot(folder)
    while True:
        kind = chance.choice(sorted(DAMAGES))
        files = DAMAGES[kind](folder, chance, older)
        if snapshot(folder) != before:
            return Damage(kind=kind, files=files)


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """What a folder holds; links by their targets, others that are not files by their kind."""
    return {path.name: _content(path) for path in sorted(folder.iterdir())}


def _content(path: Path) -> bytes | str:
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else "not a file"


def restore(folder: Path, content: dict[str, bytes | str]) -> None:
    """Put a folder of plain files back into a state that `snapshot` saw."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name, data in content.items():
        assert isinstance(data, bytes)
        (folder / name).write_bytes(data)


def _pick(folder: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(folder.iterdir()))


def _editing(change: Callable[[bytearray, random.Random], bytes | bytearray]) -> Callable[..., tuple[str, ...]]:
    def damage(folder: Path, chance: random.Random, older: Path | None) -> tuple[str, ...]:
        path = _pick(folder, chance)
        path.write_bytes(change(bytearray(path.read_bytes()), chance))
        return (path.name,)

    return damage


def _flip(data: bytearray, chance: random.Random) -> bytearray:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def _flip_many(data: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.randint(2, 64)):
        _flip(data, chance)
    return data


def _cut(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


def _grow(data: bytearray, chance: random.Random) -> bytearray:
    return data + chance.randbytes(chance.randint(1, PAGE))


def _page(data: bytearray, chance: random.Random) -> slice:
    start = chance.randrange(0, len(data), PAGE)
    return slice(start, min(start + PAGE, len(data)))


def _zero_page(data: bytearray, chance: random.Random) -> bytearray:
    page = _page(data, chance)
    data[page] = bytes(page.stop - page.start)
    return data


def _lose_end(data: bytearray, chance: random.Random) -> bytearray:
    """What delayed allocation leaves after a crash: the size is right, the last blocks were never written."""
    start = chance.randrange(0, len(data), PAGE)
    data[start:] = bytes(len(data) - start)
    return data


def _garble_page(data: bytearray, chance: random.Random) -> bytearray:
    page = _page(data, chance)
    data[page] = chance.randbytes(page.stop - page.start)
    return data


def _repeat_page(data: bytearray, chance: random.Random) -> bytearray:
    """A write that went to the wrong place."""
    source, target = _page(data, chance), _page(data, chance)
    copied = data[source]
    size = len(data)
    data[target.start : target.start + len(copied)] = copied
    return data[:size]


def _empty(data: bytearray, chance: random.Random) -> bytes:
    return b""


def _remove(folder: Path, chance: random.Random, older: Path | None) -> tuple[str, ...]:
    path = _pick(folder, chance)
    path.unlink()
    return (path.name,)


def _swap(folder: Path, chance: random.Random, older: Path | None) -> tuple[str, ...]:
    first, second = chance.sample(sorted(folder.iterdir()), 2)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    return first.name, second.name


def _take_older(folder: Path, chance: random.Random, older: Path | None) -> tuple[str, ...]:
    # Not the file that describes the others: taken alone it is a whole table of contents of another checkpoint.
    paths = [path for path in sorted(folder.iterdir()) if path.name not in (MANIFEST, ".metadata")]
    path = chance.choice(paths)
    if older is not None and (older / path.name).is_file():
        shutil.copyfile(older / path.name, path)
    return (path.name,)


def _link(folder: Path, chance: random.Random, older: Path | None) -> tuple[str, ...]:
    path = _pick(folder, chance)
    path.unlink()
    path.symlink_to(chance.choice(["/dev/zero", "/etc/passwd", "nowhere", ".", path.name]))
    return (path.name,)


def _become_folder(folder: Path, chance: random.Random, older: Path | None) -> tuple[str, ...]:
    path = _pick(folder, chance)
    path.unlink()
    path.mkdir()
    return (path.name,)


DAMAGES: dict[str, Callable[..., tuple[str, ...]]] = {
    "bit flip": _editing(_flip),
    "bit flips": _editing(_flip_many),
    "truncation": _editing(_cut),
    "growth": _editing(_grow),
    "zero page": _editing(_zero_page),
    "lost end": _editing(_lose_end),
    "garbled page": _editing(_garble_page),
    "misplaced page": _editing(_repeat_page),
    "empty file": _editing(_empty),
    "missing file": _remove,
    "swapped files": _swap,
    "file of an older one": _take_older,
    "link": _link,
    "folder for a file": _become_folder,
}


def forge(folder: Path, chance: random.Random) -> Damage:
    """Replace the manifest by one that lies, with a digest that fits the lie. One that no honest writer made."""
    envelope = json.loads((folder / MANIFEST).read_bytes())
    body = envelope.pop("body")
    kind = chance.choice(sorted(LIES))
    LIES[kind](body, chance)
    text = json.dumps(body, separators=(",", ":"))
    if kind == "deep nesting":
        depth = chance.randint(2_000, 200_000)
        text = text.replace('"facts":{', '"facts":{"deep":' + "[" * depth + "]" * depth + ",", 1)
    envelope["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(envelope)[:-1] + ', "body": ' + text + "}")
    return Damage(kind=f"hostile manifest: {kind}", files=(MANIFEST, *(file.name for file in folder.iterdir())))


Body = dict[str, Any]


def _file(body: Body, chance: random.Random) -> Body:
    found: Body = chance.choice(body["files"])
    return found


def _tensor(body: Body, chance: random.Random) -> Body:
    found: Body = chance.choice(_file(body, chance)["tensors"])
    return found


def _lead_out(body: Body, chance: random.Random) -> None:
    names = ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "model\0.safetensors", "~/x.safetensors"]
    _file(body, chance)["name"] = chance.choice([*names, "../step-000000001/model-00001.safetensors", "x" * 5000])


def _huge_size(body: Body, chance: random.Random) -> None:
    field = chance.choice(["size", "data_start"])
    _file(body, chance)[field] = chance.choice([1 << 40, 1 << 60, 1 << 62, 1 << 63, 1 << 64, 10**30, -1, -(1 << 63)])


def _huge_shape(body: Body, chance: random.Random) -> None:
    shapes = [[1 << 47] * 60, [-1], [1 << 62], [10**25], [0] * 65, [1] * 1000, "12", [1.5], [None], {}]
    _tensor(body, chance)["shape"] = chance.choice(shapes)


def _wrong_type(body: Body, chance: random.Random) -> None:
    owner = chance.choice([body, _file(body, chance), _tensor(body, chance)])
    field = chance.choice([name for name in sorted(owner) if name not in ("facts", "saved_at")])
    owner[field] = chance.choice([None, True, 1.5, [[]], {"a": 1}, -7])


def _missing_field(body: Body, chance: random.Random) -> None:
    owner = chance.choice([body, _file(body, chance), _tensor(body, chance)])
    del owner[chance.choice([name for name in sorted(owner) if name not in ("generation", "nonce")])]


def _twice(body: Body, chance: random.Random) -> None:
    if chance.random() < 0.5:
        body["files"].append(dict(_file(body, chance)))
    else:
        _file(body, chance)["tensors"].append(dict(_tensor(body, chance)))


def _absurd_number(body: Body, chance: random.Random) -> None:
    body[chance.choice(["step", "sequence", "generation"])] = chance.choice([-1, 1 << 61, 1 << 64, 10**40, 0.5])


def _other_digest(body: Body, chance: random.Random) -> None:
    _file(body, chance)["sha256"] = chance.choice(["", "0" * 64, "G" * 64, "0" * 63, "é" * 64])


def _unknown_type(body: Body, chance: random.Random) -> None:
    _tensor(body, chance)["dtype"] = chance.choice(["F99", "", "O", "f32", "C128"])


def _evil_facts(body: Body, chance: random.Random) -> None:
    body["facts"] = chance.choice(
        [[1], {"a": {"$code": "x"}}, {"a": {"$tuple": 5}}, {"a": {"$pairs": [1]}}, 7, "text"]
    )


def _nothing(body: Body, chance: random.Random) -> None:
    """The text is changed instead: such nesting cannot be made of Python objects."""


LIES: dict[str, Callable[[Body, random.Random], None]] = {
    "path out of the folder": _lead_out,
    "huge size": _huge_size,
    "huge shape": _huge_shape,
    "wrong type": _wrong_type,
    "missing field": _missing_field,
    "named twice": _twice,
    "absurd number": _absurd_number,
    "another digest": _other_digest,
    "unknown type": _unknown_type,
    "evil facts": _evil_facts,
    "deep nesting": _nothing,
}
