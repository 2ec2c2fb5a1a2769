"""A run folder in a store: what is put there when files grow, move and go, and what is made of it elsewhere."""

import os
import time
import uuid
from pathlib import Path

import pytest

from shoal.files import Url, list_below, locate
from shoal.observe import mirror, runs
from shoal.observe.folder import COPIED, write_facts
from shoal.observe.mirror import Mirror, check_unused, fetch
from shoal.spec.errors import UserError

pytest.importorskip("fsspec")


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(mirror, "PART_BYTES", 10)
    return f"memory://{uuid.uuid4().hex}/run"


def place_of(url: str) -> Url:
    place = locate(url)
    assert isinstance(place, Url)
    return place


def make_run(folder: Path, status: str = "running") -> Mirror:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / "step-1").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / "step-1" / "model").write_text("large")
    (folder / "lock").touch()
    write_facts(str(folder), {"name": folder.name, "status": status, "created": 1.0})
    return Mirror(str(folder), place_of(os.environ["MIRROR_URL"]))


@pytest.fixture
def folder(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIRROR_URL", url)
    return tmp_path / "run"


def puts_of(copying: Mirror, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copy once more; the names that were put."""
    names: list[str] = []
    write = copying._write
    with monkeypatch.context() as patch:
        patch.setattr(copying, "_write", lambda name, data: (names.append(name), write(name, data)))
        copying.copy()
    return names


def test_only_what_grew_is_put_again(folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copying = make_run(folder)
    log = folder / "logs" / "0.log"
    log.write_text("0123456789abcdef")
    copying.copy()
    assert {"logs/0.log", "logs/0.log.more-000001", "run.json", COPIED} <= set(list_below(place_of(url)))
    with log.open("a") as file:
        file.write("ghijklmn")
    assert puts_of(copying, monkeypatch) == ["logs/0.log.more-000001", "logs/0.log.more-000002", COPIED]
    assert puts_of(copying, monkeypatch) == [COPIED]
    there = Path(fetch(url, str(tmp_path / "home")))
    assert (there / "logs" / "0.log").read_text() == "0123456789abcdefghijklmn"
    assert not (there / "checkpoints").exists()
    assert not (there / "lock").exists()


def test_files_that_were_replaced_moved_or_removed(folder: Path, url: str, tmp_path: Path) -> None:
    copying = make_run(folder)
    (folder / "metrics").write_text("a" * 35)
    copying.copy()
    (folder / "metrics").rename(folder / "metrics.1")
    (folder / "metrics").write_text("b" * 5)
    copying.copy()
    there = list_below(place_of(url))
    assert [name for name in sorted(there) if name.startswith("metrics")] == [
        *("metrics", "metrics.1", "metrics.1.more-000001", "metrics.1.more-000002", "metrics.1.more-000003"),
    ]
    assert (Path(fetch(url, str(tmp_path / "home"))) / "metrics.1").read_text() == "a" * 35
    (folder / "metrics.1").unlink()
    copying.copy()
    found = Path(fetch(url, str(tmp_path / "home")))
    assert (found / "metrics").read_text() == "b" * 5
    assert not (found / "metrics.1").exists(), "what is merged into another file would count twice"
    assert not [name for name in list_below(place_of(url)) if name.startswith("metrics.1")]


def test_a_copy_is_running_while_it_is_kept_up_to_date_and_lost_after_that(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = make_run(folder)
    copying.copy()
    home = str(tmp_path / "home")
    assert runs.find_run(home, url).status == "running"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * runs.FRESH_SECONDS)
    assert runs.find_run(home, url).status == "lost"
    make_run(folder, "finished")
    copying.copy()
    assert runs.find_run(home, url).status == "finished"


def test_a_failed_put_is_made_up_for(folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copying = make_run(folder)
    (folder / "journal.jsonl").write_text("x" * 25)
    write = copying._write

    def fail(name: str, data: bytes) -> None:
        if name.endswith("more-000001"):
            raise OSError("gone")
        write(name, data)

    with monkeypatch.context() as patch:
        patch.setattr(copying, "_write", fail)
        with pytest.raises(OSError, match="gone"):
            copying.copy()
    copying.copy()
    assert (Path(fetch(url, str(tmp_path / "home"))) / "journal.jsonl").read_text() == "x" * 25


def test_what_an_earlier_launcher_left_is_swept_and_what_vanishes_is_passed_over(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_run(folder)
    (folder / "metrics").write_text("a" * 35)
    (folder / "checkpoints.url").write_text(url)
    first.copy()
    model = place_of(url) / "checkpoints" / "step-1" / "model"
    model.fs.pipe_file(model.path, b"large")
    (folder / "metrics").unlink()
    (folder / "metrics").write_text("b" * 15)
    files = mirror._files_in
    gone = [("run.json.123", next(seen for name, seen in files(str(folder)) if name == "run.json"))]
    second = Mirror(str(folder), place_of(url))
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "_files_in", lambda where: [*files(where), *gone])
        second.copy()
    assert "run.json.123" not in list_below(place_of(url))
    there = Path(fetch(url, str(tmp_path / "home")))
    assert (there / "metrics").read_text() == "b" * 15
    assert "checkpoints/step-1/model" in list_below(place_of(url))
    assert (there / "checkpoints.url").read_text() == url


def test_names_that_lead_elsewhere_are_not_followed(url: str, tmp_path: Path) -> None:
    assert mirror._in_parts({"run.json": 1, "../../evil": 1, "a//b": 1, "logs/0.log": 1, "checkpoints-1/x": 1}) == {
        "logs/0.log": ["logs/0.log"],
        "run.json": ["run.json"],
    }


def test_where_no_run_is_and_where_one_is(folder: Path, url: str, tmp_path: Path) -> None:
    check_unused(place_of(url))
    with pytest.raises(UserError, match="is not a run folder"):
        runs.find_run(str(tmp_path), url)
    make_run(folder).copy()
    with pytest.raises(UserError, match="already holds a run") as caught:
        check_unused(place_of(url))
    assert f"--resume {url}" in caught.value.hint
