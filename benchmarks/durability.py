"""What is left of checkpoints after power loss, a crash at any point, and damage; PyTorch's DCP beside ours.

Counts, not times: how many of so many trials lost something that had been acknowledged, or believed damaged data.
Needs root, strace and mkfs.ext4.
"""

import json
import logging
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import dcp_writer
from benchmarks.harness import check, summarize
from shoal.checkpoint.state import digest
from shoal.checkpoint.store import FolderStore
from shoal.testing.corruption import corrupt, forge, restore, sample_state, snapshot
from shoal.testing.power_loss import Image, lose_power
from shoal.testing.store_contract import make_state

NUM_IMAGES = 200
NUM_CORRUPTIONS = 1000
WRITER = "shoal.testing.checkpoint_writer"
NO_FOLDER_SYNC = (
    "import sys, pathlib; from shoal.checkpoint import disk; from shoal.testing import checkpoint_writer\n"
    "disk.sync_folder = lambda path: None\n"
    "checkpoint_writer.write(pathlib.Path(sys.argv[1]), 1000000, 3, 0)"
)


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    num_images, num_corruptions, stride = (2, 20, 40) if is_quick else (NUM_IMAGES, NUM_CORRUPTIONS, 1)
    images = lose_power_to_all(num_images)
    crashes = {
        f"keep={keep}{', with a fence' * fenced}": crash(keep, fenced, stride) for keep in (1, 2) for fenced in (0, 1)
    }
    stops = {"woken after the fence": stop(stride, 0), "woken after the next save": stop(stride, 1)}
    damages = {"shoal": corrupt_ours(num_corruptions), "PyTorch DCP": corrupt_theirs(num_corruptions)}
    lost = (
        images[0]["lost"] + sum(row["lost"] for row in crashes.values()) + sum(row["wrong"] for row in stops.values())
    )
    return {
        "rows": images,
        "more": {
            "killed at every system call of one save": [{"save": name, **row} for name, row in crashes.items()],
            "stopped after every system call of one save; another generation takes over": [
                {"then": name, **row} for name, row in stops.items()
            ],
            "random damage, one file or two": [{"format": name, **row} for name, row in damages.items()],
        },
        "checks": [
            check("acknowledged checkpoints lost, of all trials", summarize([float(lost)]), "≤ 0"),
            check("damage found, %", summarize([100 * damages["shoal"]["found"] / num_corruptions]), "≥ 100"),
            check("file named, %", summarize([100 * damages["shoal"]["named"] / num_corruptions]), "≥ 100"),
            check("fell back, %", summarize([100 * damages["shoal"]["fell back"] / num_corruptions]), "≥ 100"),
        ],
        "notes": [
            "an image is what is found after power loss: ext4 on a loop device, copied while the writer is stopped;",
            "lost: the newest acknowledged checkpoint, or a newer one, does not load whole from it;",
            "the row without fsync of the folder is ours with that one call left out: it shows what the rig sees;",
            "a quarter of the damage to ours is a forged manifest with a right digest; DCP gets all other kinds",
        ],
        "samples_seconds": {},
    }


def lose_power_to_all(num_images: int) -> list[dict[str, Any]]:
    script = str(Path(dcp_writer.__file__))
    writers: dict[str, tuple[list[str], Callable[[Path, int], Image]]] = {
        "shoal": ([sys.executable, "-m", WRITER, "write", "{folder}", "1000000", "3", "0"], find_ours),
        "shoal without fsync of the folder": ([sys.executable, "-c", NO_FOLDER_SYNC, "{folder}"], find_ours),
        "PyTorch DCP, a folder a step": ([sys.executable, script, "write", "{folder}", "steps"], find_theirs),
        "PyTorch DCP, one folder": ([sys.executable, script, "write", "{folder}", "one"], find_theirs),
    }
    rows = []
    for name, (command, look) in writers.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("torch.distributed.checkpoint").setLevel(
                logging.CRITICAL
            )  # it logs what it cannot load
            images = list(lose_power(command, num_images, seed=1, look=look))
        behind = [image.acknowledged - image.found for image in images if not image.is_kept]
        rows.append(
            {"writer": name, "images": len(images), "lost": len(behind), "most steps lost": max(behind, default=0)}
        )
    return rows


def find_ours(folder: Path, acknowledged: int) -> Image:
    try:
        loaded = FolderStore(folder).load()
    except Exception as error:
        return Image(acknowledged=acknowledged, found=0, problem=str(error))
    is_same = digest(loaded.state.tensors) == digest(make_state(loaded.state.step).tensors)
    return Image(acknowledged=acknowledged, found=loaded.state.step, problem="" if is_same else "other tensors")


def find_theirs(folder: Path, acknowledged: int) -> Image:
    return Image(acknowledged=acknowledged, found=dcp_writer.find(folder))


def run_writer(*args: object) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", WRITER, str(args[0]), f"{folder}/checkpoints", *map(str, args[1:])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if not found or "cannot" in found[0]:
        raise RuntimeError(f"strace cannot attach here: {found}")
    return found


def crash(keep: int, is_fenced: int, stride: int) -> dict[str, Any]:
    found = run_writer("traced", keep, is_fenced, stride)
    lost = [item for item in found if item["loaded"] < item["acknowledged"] or not item["same"] or item["skipped"]]
    return {"points": len(found), "killed": sum(item["killed"] for item in found), "lost": len(lost)}


def stop(stride: int, saves: int) -> dict[str, Any]:
    found = run_writer("stopped", stride, saves)
    right = [("00", []), ("33", [True])]
    wrong = [
        item for item in found if item["loaded"] != item["before"] or (item["said"], item["counts"]) not in right
    ]
    return {"points": len(found), "refused": sum(item["said"] == "00" for item in found), "wrong": len(wrong)}


def corrupt_ours(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, FolderStore(folder, max_file_bytes=10_000) as store:
        older, newer = (store.save(sample_state(step), wait=True) and store.load().path for step in (1, 2))
        content, found = snapshot(newer), {"found": 0, "named": 0, "fell back": 0, "believed": 0}
        for seed in range(count):
            chance = random.Random(seed)
            damage = forge(newer, chance) if seed % 4 == 3 else corrupt(newer, chance, older)
            loaded = store.load()
            is_found = loaded.skipped != ()
            found["found"] += is_found
            found["named"] += is_found and loaded.skipped[0].reason.startswith(damage.files)
            found["fell back"] += digest(loaded.state.tensors) == digest(sample_state(1).tensors)
            found["believed"] += loaded.state.step == 2
            restore(newer, content)
    return {"damages": count, **found}


def corrupt_theirs(count: int) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(dcp_writer.__file__)), "corrupt", folder, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [item for item in found if not item["noticed"] and not item["right"]]
    return {
        "damages": len(found),
        "found": sum(item["noticed"] for item in found),
        "named": sum(item["named"] for item in found),
        "fell back": 0,
        "believed": sum(not item["noticed"] for item in found),
        "wrong values": len(wrong),
    }
