"""URLs: where they lead, how they are shown, and what is kept of what they name. No server."""

import os
import time
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint import remote
from shoal.checkpoint.foreign import ELSEWHERE, read_weights
from shoal.checkpoint.state import digest
from shoal.checkpoint.store import FolderStore
from shoal.data import cache
from shoal.files import StoreFailed, Url, answered, explain, is_url, locate, mask
from shoal.spec.errors import UserError
from shoal.testing.store_contract import assert_same, make_state
from shoal.train.loop import Trainer
from shoal.train.settings import make_settings, values_of

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory() -> Url:
    """A file system of fsspec that is no object store, so that renames are used."""
    fsspec.filesystem("memory").store.clear()
    found = locate("memory://place")
    assert isinstance(found, Url)
    return found


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("runs/plain", "runs/plain"),
        ("s3://key:secret@bucket/run", "s3://***@bucket/run"),
        ("webhdfs://user@host:9870/run", "webhdfs://***@host:9870/run"),
        ("https://host/x.csv?X-Amz-Signature=abc&y=1", "https://host/x.csv?***"),
        ("cannot read https://a:b@host/x?token=1 now", "cannot read https://***@host/x?*** now"),
    ],
)
def test_secrets_are_not_shown(text, shown):
    assert mask(text) == shown


def test_where_a_url_leads(memory: Url):
    assert [is_url(text) for text in ("s3://b", "C:/x", "a/b", "hdfs://h/x", 7)] == [True, False, False, True, False]
    assert locate("runs/x") == Path("runs/x")
    assert locate("file:///tmp/a%20b") == Path("/tmp/a b")
    inner = memory / "a" / "b.csv"
    assert (str(inner), inner.name, str(inner.parent)) == ("memory://place/a/b.csv", "b.csv", "memory://place/a")
    assert inner.parent == memory / "a"


@pytest.mark.parametrize(
    ("url", "message", "hint"),
    [("abc://x", "cannot be used", "s3://bucket"), ("gs://x/y", "package is not installed", "install")],
)
def test_what_leads_nowhere(url, message, hint):
    with pytest.raises(UserError, match=message) as caught:
        locate(url)
    assert hint in caught.value.hint


def test_hdfs_without_hadoop_says_what_it_needs(monkeypatch):
    pytest.importorskip("pyarrow")
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR", "CLASSPATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StoreFailed, match="cannot be used from this machine") as caught:
        locate("hdfs://namenode:8020/runs")
    assert "webhdfs://" in caught.value.hint


def test_a_store_that_does_not_answer(memory: Url):
    with pytest.raises(StoreFailed, match="cannot be reached") as caught:
        answered(memory, lambda: time.sleep(0.5), seconds=0.01)
    assert "no answer within 0.01 s" in caught.value.why
    assert answered(memory, lambda: 7) == 7
    with pytest.raises(KeyError):
        answered(memory, lambda: {}["x"])


def test_errors_of_clients_are_told_apart_by_name_and_show_no_secret():
    kinds = {
        type("NoCredentialsError", (Exception,), {})("none"): "No credentials",
        PermissionError("denied"): "may not be used",
        type("EndpointConnectionError", (ConnectionError,), {})("http://u:p@h/"): "cannot be reached",
        RuntimeError("else"): "failed",
    }
    for error, message in kinds.items():
        found = explain("s3://bucket/x", error)
        assert message in found.message
        assert "u:p" not in found.why
        assert isinstance(found, OSError)
        assert isinstance(found, UserError)


def test_settings_keep_urls_without_secrets(tmp_path: Path):
    given = {"batch_size": 8, "checkpoint_dir": tmp_path}
    settings, origins = make_settings(given, {"checkpoint_dir": "s3://key:secret@bucket/run"})
    assert settings.checkpoint_dir == "s3://key:secret@bucket/run"
    assert "secret" not in str(values_of(settings)) + str(origins)
    assert make_settings(given, {})[0].checkpoint_dir == str(tmp_path)
    with pytest.raises(UserError, match="checkpoint_dir"):
        make_settings({**given, "checkpoint_dir": 7}, {})


@pytest.mark.parametrize("place", ["memory://place/run", "folder"])
def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(
    memory, home: Path, tmp_path: Path, monkeypatch, place
):
    monkeypatch.chdir(tmp_path)

    def train(steps: int, is_resumed: bool) -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        data = (torch.ones(8, 2), torch.ones(8, 1))
        trainer = Trainer(
            model,
            lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            batch_size=8,
            checkpoint_dir=place,
            resume=is_resumed,
        )
        with trainer:
            trainer.fit(steps=steps)
            return trainer.place.step

    assert train(2, is_resumed=False) == 2
    with pytest.raises(UserError, match="already holds the checkpoints of a run, up to step 2") as caught:
        train(4, is_resumed=False)
    assert "resume=True" in caught.value.hint
    assert train(4, is_resumed=True) == 4
    assert [entry.step for entry in FolderStore(f"{place}/checkpoints").list()] == [4, 2]
    known = [file.parent for file in (home / "runs").rglob(ELSEWHERE)]  # a run's folder knows where they are
    assert len(known) == 2
    assert digest(read_weights(known[0])) == digest(read_weights(place))


def test_a_manifest_gets_its_name_when_it_is_whole(memory: Url, monkeypatch):
    """Where files are seen while they are written, one that was cut off is no checkpoint."""
    store = FolderStore(memory, keep=2)
    store.save(make_state(1), wait=True)

    def refuse(*_: object) -> None:
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "_rename", refuse)
        patch.setattr(remote, "discard", refuse)
        assert not store.save(make_state(2), wait=True).is_durable
        store._saving.retries.stop()
    assert [entry.step for entry in store.list()] == [1]
    assert any(manifests.NAME not in files for files in remote.list_folders(memory).values())
    assert store.save(make_state(3), wait=True).is_durable
    assert all(manifests.NAME in files for files in remote.list_folders(memory).values())
    assert_same(store.load().state, make_state(3))


def test_a_place_that_cannot_be_listed_is_not_an_empty_one(memory: Url, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(memory.fs, "ls", refuse)
    with pytest.raises(UserError, match="Cannot look for checkpoints"):
        FolderStore(memory, generation=0).list()


def test_copies_are_whole_kept_and_bounded(memory: Url, tmp_path: Path, monkeypatch):
    urls = [memory / f"{name}.csv" for name in "abc"]
    for url in urls:
        url.fs.pipe_file(url.path, b"x" * 100)
    monkeypatch.setattr(cache, "_TIMES", ("created",))  # all that this file system tells
    copies = [cache.fetch(url, tmp_path, max_bytes=250) for url in urls]
    assert all(copy.read_bytes() == b"x" * 100 for copy in copies)  # all were used just now
    long_ago = time.time() - 2 * cache.KEEP_SECONDS
    for age, copy in enumerate(copies[:2]):
        os.utime(copy, (long_ago - age, long_ago - age))
    assert cache.fetch(urls[2], tmp_path, max_bytes=250) == copies[2]
    assert [copy.exists() for copy in copies] == [True, False, True]  # the one used longest ago went
    copies[0].write_bytes(b"cut")
    assert cache.fetch(urls[0], tmp_path) == copies[0]
    assert copies[0].read_bytes() == b"x" * 100
    assert not list(tmp_path.glob(".fetching*"))


def test_a_download_that_fails_leaves_no_copy(memory: Url, tmp_path: Path, monkeypatch):
    url = memory / "a.csv"
    url.fs.pipe_file(url.path, b"x" * 100)

    def cut(source: str, target: str) -> None:
        Path(target).write_bytes(b"x" * 50)

    monkeypatch.setattr(url.fs, "get_file", cut)
    with pytest.raises(UserError, match="came with 50 bytes, 100 were promised"):
        cache.fetch(url, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".lock")] == []


def test_a_full_disk_is_told(memory: Url, tmp_path: Path):
    url = memory / "a.csv"
    url.fs.pipe_file(url.path, b"x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"No copy of memory://place/a\.csv can be kept"):
        cache.fetch(url, tmp_path / "file" / "cache")
