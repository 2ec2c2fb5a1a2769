"""Checkpoints, weights and data in an object store: a real server on this machine, with signed requests."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint import remote, saving
from shoal.checkpoint.foreign import read_weights, write_weights
from shoal.checkpoint.state import digest
from shoal.checkpoint.store import FolderStore
from shoal.files import StoreFailed, Url, check, list_below, locate
from shoal.spec.errors import UserError
from shoal.testing import Faults
from shoal.testing.rigs.stores import ObjectStore
from shoal.testing.store_contract import assert_same, make_state
from tests.run.launching import Box


def at(url: str) -> Url:
    found = locate(url)
    assert isinstance(found, Url)
    return found


def steps_in(url: str) -> list[int]:
    return [entry.step for entry in FolderStore(url).list()]


# A server that dies


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["before the manifest", pytest.param("before a file", marks=pytest.mark.slow)])
def test_a_server_killed_in_the_middle_of_a_save(bucket, object_server: ObjectStore, monkeypatch, moment):
    monkeypatch.setattr(saving, "PAUSES", (0.2,))
    told: list[str] = []
    store = FolderStore(f"{bucket}/run", max_file_bytes=1, on_event=lambda kind, data: told.append(kind))
    store.save(make_state(1), wait=True)
    name = "publish" if moment == "before the manifest" else "write_file"
    real, num_calls = getattr(remote, name), 0

    def die_first(*args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == (1 if name == "publish" else 3):
            object_server.kill()
        return real(*args)

    monkeypatch.setattr(remote, name, die_first)
    save = store.save(make_state(2), wait=True)
    assert not save.is_durable
    assert "cannot be reached" in save.error.why
    assert "AWS_ENDPOINT_URL" in save.error.hint
    with pytest.raises(UserError, match="Cannot look for checkpoints"):
        store.list()
    object_server.start()
    # Tries that began while it was away may still fail; the state is kept until one succeeds.
    store.close()
    if not save.is_durable:
        assert steps_in(f"{bucket}/run") == [1]
        assert store.save(make_state(2), wait=True).is_durable
    assert steps_in(f"{bucket}/run") == [2, 1]
    assert_same(FolderStore(f"{bucket}/run").load().state, make_state(2))
    assert 1 <= told.count("checkpoint_failed") <= 2  # broken off, then not there: not once for each try
    assert all(manifests.NAME in files for files in remote.list_folders(at(f"{bucket}/run")).values())


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_nothing_half_is_visible_while_the_server_is_back_and_the_writer_gone(bucket, object_server, monkeypatch):
    store = FolderStore(f"{bucket}/run", max_file_bytes=1)
    store.save(make_state(1), wait=True)

    def vanish(*_: object) -> None:
        store._saving.retries.stop()
        object_server.kill()
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "publish", vanish)
        assert not store.save(make_state(2), wait=True).is_durable
        store.close()
    object_server.start()
    assert len(remote.list_folders(at(f"{bucket}/run"))) == 2  # the files of step 2 are there
    later = FolderStore(f"{bucket}/run")
    assert later.load().skipped == ()
    assert_same(later.load().state, make_state(1))
    later.save(make_state(3), wait=True)
    assert len(remote.list_folders(at(f"{bucket}/run"))) == 2  # and were removed


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_server_killed_at_random_moments(bucket, object_server: ObjectStore, monkeypatch):
    """Whatever was acknowledged is there, and what is there is whole."""
    monkeypatch.setattr(saving, "PAUSES", (0.2,))
    url, acknowledged = f"{bucket}/run", 0
    with FolderStore(url, keep=2, max_file_bytes=1) as store:
        for step in range(1, 6):
            timer = threading.Timer(0.1 * step, object_server.kill)
            timer.start()
            save = store.save(make_state(step), wait=True)
            acknowledged = step if save.is_durable else acknowledged
            timer.join()
            object_server.start()
            found = FolderStore(url).list()
            assert not [entry.problem for entry in found if entry.problem]
            if acknowledged:
                assert FolderStore(url).load().state.step >= acknowledged
    assert FolderStore(url).load().state.step == 5


# A writer that dies


def sweep(url: str, stride: int, environment: dict[str, str]) -> list[dict]:
    command = [sys.executable, "-m", "shoal.testing.remote_writer", url, str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_sweep(found: list[dict]) -> None:
    assert found[0]["killed"]
    for item in found:
        assert item["loaded"] in (2, 3), item
        assert item["killed"] or item["loaded"] == 3, item
        assert item["same"], item
        assert item["saved"], item
        assert item["skipped"] == 0, item
        assert item["steps"] == [4, item["loaded"]], item
        assert item["left"] == [], item


@pytest.mark.timeout(1000)
@pytest.mark.slow
def test_a_writer_killed_at_every_call_of_a_save(bucket):
    found = sweep(f"{bucket}/sweep", 1, dict(os.environ))
    check_sweep(found)
    assert {item["loaded"] for item in found} == {2, 3}
    assert not found[-1]["killed"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_writer_killed_at_some_calls_of_a_save(bucket):
    found = sweep(f"{bucket}/sweep", 9, dict(os.environ))
    check_sweep(found)
    assert len(found) >= 2


# What is damaged, left behind, or somebody else's


def change(url: Url, data: bytes) -> None:
    url.fs.pipe_file(url.path, data)


@pytest.mark.parametrize("damage", ["changed", "shorter", "missing", "manifest"])
def test_a_damaged_object_is_found_and_the_checkpoint_before_is_used(bucket, damage):
    told: list[dict] = []
    store = FolderStore(f"{bucket}/run", on_event=lambda kind, data: told.append({"kind": kind, **data}))
    store.save(make_state(1), wait=True)
    path = store.save(make_state(2), wait=True).path
    name = manifests.NAME if damage == "manifest" else "model-00001.safetensors"
    file = at(f"{path}/{name}")
    data = bytearray(file.fs.cat_file(file.path))
    data[-3] ^= 1
    if damage == "missing":
        file.fs.rm_file(file.path)
    else:
        change(file, bytes(data[:-1] if damage == "shorter" else data))
    loaded = store.load()
    assert_same(loaded.state, make_state(1))
    assert [item.path for item in loaded.skipped] == [path]
    assert loaded.skipped[0].reason.startswith(name)
    assert told[-1]["kind"] == "checkpoint_skipped"
    assert store.verify(2).problem
    assert not store.verify(1).problem


def test_leftovers_go_with_the_next_save(bucket):
    folder = at(f"{bucket}/run")
    change(folder / "step-000000009-123456789" / "model-00001.safetensors", b"half")
    change(folder / "step-000000009-g7-123456789" / "model-00001.safetensors", b"of a newer generation")
    change(folder / "notes.txt", b"of somebody")
    bucket_name, key = folder.path.split("/")[0], "run/step-000000008-111111111/model-00001.safetensors"
    folder.fs.call_s3("create_multipart_upload", Bucket=bucket_name, Key=key)
    store = FolderStore(folder)
    assert store.list() == ()
    store.save(make_state(1), wait=True)
    left = set(remote.list_folders(folder)) - {entry.path.name for entry in store.list()}
    assert left == {"step-000000009-g7-123456789"}
    assert "notes.txt" in remote.list_names(folder)
    assert not folder.fs.call_s3("list_multipart_uploads", Bucket=bucket_name).get("Uploads")


def test_of_two_who_save_in_one_place_the_later_one_goes_on(bucket):
    first, second = FolderStore(f"{bucket}/run"), FolderStore(f"{bucket}/run")
    assert first.save(make_state(1), wait=True).is_durable
    assert second.save(make_state(2), wait=True).is_durable
    refused = first.save(make_state(3), wait=True)
    assert not refused.is_durable
    assert "Another process saves" in refused.error.why
    first._saving.retries.stop()
    assert second.save(make_state(4), wait=True).is_durable
    assert 3 not in steps_in(f"{bucket}/run")


def test_who_is_overtaken_between_manifest_and_answer_takes_it_back(bucket, monkeypatch):
    first, second = FolderStore(f"{bucket}/run"), FolderStore(f"{bucket}/run")
    first.save(make_state(1), wait=True)
    real = remote.publish

    def overtaken(*args):
        monkeypatch.setattr(remote, "publish", real)
        real(*args)
        assert second.save(make_state(2), wait=True).is_durable

    monkeypatch.setattr(remote, "publish", overtaken)
    assert not first.save(make_state(3), wait=True).is_durable
    first._saving.retries.stop()
    assert steps_in(f"{bucket}/run") == [2, 1]


# What cannot be used


def asked(url: str, **environment: str) -> str:
    """What people are told, in a process of its own: clients remember credentials."""
    code = f"import shoal.files as f\ntry: f.check(f.locate({url!r}))\nexcept f.UserError as e: print(e.render())"
    env = {name: value for name, value in {**os.environ, **environment}.items() if value}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_no_bucket(bucket):
    with pytest.raises(StoreFailed, match=r"There is no bucket s3://no-such-bucket\.") as caught:
        check(at("s3://no-such-bucket/run"))
    assert "make the bucket" in caught.value.hint
    check(at(f"{bucket}/nothing/there/yet"))


def test_no_credentials_and_wrong_ones(bucket):
    assert "No credentials for" in asked(bucket, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert "may not be used with these credentials" in asked(bucket, AWS_SECRET_ACCESS_KEY="wrong")


def test_a_server_that_is_not_there(bucket):
    said = asked(bucket, AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert "cannot be reached" in said
    assert "AWS_ENDPOINT_URL" in said


# Weights and data


def test_weights_from_and_to_a_url(bucket, tmp_path: Path):
    FolderStore(f"{bucket}/run/checkpoints").save(make_state(3), wait=True)
    weights = read_weights(f"{bucket}/run")
    assert digest(weights) == digest(make_state(3).part("model"))
    write_weights(weights, f"{bucket}/out/weights.safetensors")
    write_weights(weights, f"{bucket}/out.pt", "state_dict")
    for name in ("out/weights.safetensors", "out.pt", "out"):
        assert digest(read_weights(f"{bucket}/{name}")) == digest(weights)
    with pytest.raises(UserError, match="no weights"):
        read_weights(f"{bucket}/nothing.pt")
    with pytest.raises(UserError, match="DCP folder"):
        write_weights(weights, f"{bucket}/folder", "dcp")


def test_data_crosses_the_network_once(bucket, object_server: ObjectStore, tmp_path: Path):
    pytest.importorskip("pyarrow")
    from shoal.data.tables import file_source

    folder = at(f"{bucket}/data")
    for number in (1, 2):
        change(folder / f"{number}.csv", f"x,y\n{number},2\n3,4\n".encode())

    def fetched() -> int:
        name = bucket.removeprefix("s3://")
        return object_server.said().count(f"GET /{name}/data/1.csv ")

    for _ in range(3):
        source = file_source([f"{bucket}/data/*.csv"], tmp_path)
        assert source[0]["x"] == 1
        assert source[2]["x"] == 2
    assert fetched() == 1
    change(folder / "1.csv", b"x,y\n9,2\n3,4\n")
    assert file_source([f"{bucket}/data/1.csv"], tmp_path)[0]["x"] == 9
    assert fetched() == 2
    with pytest.raises(UserError, match=rf"There is no file {bucket}/data/7.csv"):
        file_source([f"{bucket}/data/7.csv"], tmp_path)
    with pytest.raises(UserError, match="No file matches"):
        file_source([f"{bucket}/data/*.parquet"], tmp_path)
    change(folder / "bad.csv", b"x,y\n1\n")
    with pytest.raises(UserError, match=rf"{bucket}/data/bad.csv cannot be read"):
        file_source([f"{bucket}/data/bad.csv"], tmp_path)


# A run

JOB = """
import sys, torch, shoal

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = (x, x.sum(1, keepdim=True))
loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = int(sys.argv[1])
with shoal.Trainer(model, loss, optimizer, data, batch_size=16, exact=True, resume="resume" in sys.argv) as trainer:
    trainer.fit(steps=steps)
    digest = trainer.digest()
    if trainer.rank == 0:
        print("digest", trainer.place.step, digest)
"""


def digest_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if "digest" in line).partition("digest ")[2]


@pytest.mark.timeout(300)
def test_a_run_saved_by_url_goes_on_in_another_folder_with_the_same_parameters(bucket, tmp_path: Path):
    boxes = [Box(tmp_path / name) for name in ("here", "there", "whole")]
    for box in boxes:
        box.write("job.py", JOB)
    here, there, whole = boxes
    url = f"checkpoint_dir={bucket}/mlp"
    digest_of(here.run("run", "-n", "2", "-o", url, "job.py", "6"))
    assert steps_in(f"{bucket}/mlp/checkpoints") == [6]
    assert not list(tmp_path.rglob("*.safetensors"))
    resumed = digest_of(there.run("run", "-n", "2", "-o", url, "job.py", "12", "resume"))
    assert resumed.startswith("12 ")
    assert resumed == digest_of(whole.run("run", "-n", "2", "job.py", "12"))


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_an_elastic_run_fences_by_url_and_goes_back_to_what_is_there(bucket, tmp_path: Path):
    """The rank that saves is lost, so another fences it out; then all are lost, and it comes back from there."""
    box = Box(tmp_path / "box")
    job = str(box.write("job.py", JOB))
    whole = digest_of(box.run("run", "-n", "1", "job.py", "12"))
    faults = Faults().kill(rank=0, step=3).kill(rank=0, step=8).kill(rank=1, step=8)
    options = {"checkpoint_dir": f"{bucket}/mlp", "checkpoint_every": "2"}
    run = faults.run(job, "12", num_workers="1:2", options=options, is_quiet=True)
    assert run.exit_code == 0, run.events
    assert {event.data["from"] for event in run.of("state_rebuilt")} >= {"checkpoint"}
    newest = FolderStore(f"{bucket}/mlp/checkpoints").list()[0]
    assert (newest.step, newest.problem) == (12, "")
    assert newest.generation > 0
    plain = box.run("run", "-n", "1", "-o", f"checkpoint_dir={bucket}/mlp", "job.py", "12", "resume")
    assert digest_of(plain) == whole


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_folder_at_a_url_is_read_elsewhere_and_goes_on_there(bucket, tmp_path: Path):
    here, there, whole = boxes = [Box(tmp_path / name) for name in ("here", "there", "whole")]
    for box in boxes:
        box.write("job.py", JOB)
    url = f"{bucket}/runs/mlp"
    began = digest_of(here.run("run", "-n", "2", "--log-dir", url, "job.py", "6"))
    files = set(list_below(at(url)))
    assert {"run.json", "journal.jsonl", "metrics-0.jsonl", "metrics-1.jsonl", "logs/0.log", "copied.json"} <= files
    assert not {"lock", "socket"} & files
    assert steps_in(f"{url}/checkpoints") == [6]
    assert not list(tmp_path.rglob("*.safetensors"))

    logs = there.run("logs", url)
    assert (logs.returncode, began in logs.stdout) == (0, True), logs.stderr
    explained = there.run("explain", url)
    assert explained.returncode == 0, explained.stderr
    assert "6 steps" in explained.stdout
    exported = there.run("export", url, "weights.safetensors")
    assert exported.returncode == 0, exported.stderr
    refused = there.run("run", "--log-dir", url, "job.py", "6")
    assert refused.returncode == 2
    assert f"error: {url} already holds a run." in refused.stderr

    resumed = digest_of(there.run("run", "-n", "2", "--resume", url, "job.py", "12"))
    assert resumed == digest_of(whole.run("run", "-n", "2", "job.py", "12"))
    again = here.run("explain", url, "--json")
    assert again.returncode == 0, again.stderr
    journal = at(f"{url}/journal.jsonl")
    events = [json.loads(line)["kind"] for line in journal.fs.cat_file(journal.path).splitlines()]
    assert events.count("run_ended") == 2


WAITING = """
import os, time, torch, shoal

model = torch.nn.Linear(2, 1)
loss = lambda model, batch: model(batch[0]).square().mean()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with shoal.Trainer(model, loss, optimizer, (torch.ones(64, 2),), batch_size=8) as trainer:
    while not os.path.exists("finish"):
        trainer.fit(steps=1)
        time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_launcher_that_is_killed_leaves_its_run_folder_at_the_url(bucket, tmp_path: Path):
    here, there = boxes = [Box(tmp_path / name) for name in ("here", "there")]
    for box in boxes:
        box.write("job.py", WAITING)
    url = f"{bucket}/runs/waiting"
    launcher = here.start("run", "--log-dir", url, "job.py")
    try:
        here.wait_for(lambda: "metrics-0.jsonl" in list_below(at(url)), 100)
        refused = there.run("run", "--resume", url)
        assert refused.returncode == 2
        assert f"error: {url} is a run that goes on, on " in refused.stderr
        local = here.home / "runs" / "waiting" / "metrics-0.jsonl"
    finally:
        launcher.kill()
        launcher.communicate()
    here.wait_for_peace()
    there_is = at(f"{url}/metrics-0.jsonl")
    assert there_is.fs.cat_file(there_is.path) == local.read_bytes()
    assert there.run("explain", url).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_while_the_store_of_its_folder_is_away(bucket, object_server: ObjectStore, tmp_path: Path):
    here = Box(tmp_path / "here")
    here.write("job.py", WAITING)
    url = f"{bucket}/runs/waiting"
    options = ("-o", f"checkpoint_dir={tmp_path}/kept")
    launcher = here.start("run", "--log-dir", url, *options, "job.py")
    told = []
    try:
        here.wait_for(lambda: "metrics-0.jsonl" in list_below(at(url)), 100)
        object_server.kill()
        while "is not copied to" not in "".join(told[-1:]):
            told.append(launcher.stderr.readline())
        object_server.start()
        while "again" not in told[-1]:
            told.append(launcher.stderr.readline())
        (here.folder / "finish").touch()
        _, rest = launcher.communicate(timeout=100)
    finally:
        launcher.kill()
        launcher.communicate()
        if not object_server._processes:
            object_server.start()
    assert launcher.returncode == 0, rest
    assert sum("cannot be reached" in line for line in told) == 1, "trouble is told once"
    facts = at(f"{url}/run.json")
    assert json.loads(facts.fs.cat_file(facts.path))["status"] == "finished"
