"""What a run measured, in each tool, read back with the tool's own reader."""

import contextlib
import csv
import json
import math
import subprocess
import sys
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
import pytest

from shoal.observe.exporters import KINDS, parse_target
from shoal.observe.exporters.mlflow import metric_name
from shoal.observe.exporters.prometheus import parse_place
from shoal.observe.exporters.wandb import run_id
from shoal.observe.journal import Journal
from shoal.observe.points import Point, encode, points_path
from shoal.observe.runs import read_run
from shoal.observe.scalars import Scalars, ScalarsReader
from shoal.observe.send import Sender, follow
from shoal.observe.table import Table
from shoal.spec.errors import UserError
from shoal.testing import rigs
from tests.unit.observing import Home, event, make_step, make_steps, write_metrics

STEPS = 5


@pytest.fixture
def run(tmp_path):
    """A run of two workers that is over: five steps, the last with a loss that is not a number, numbers of the
    script's own, of which one is called like ours, and settings."""
    path = Home(str(tmp_path)).add_ended()
    steps = [*make_steps(STEPS - 1, grad_norm=2.0), make_step(STEPS, loss=math.nan, grad_norm=2.0)]
    write_metrics(path, {0: steps, 1: make_steps(STEPS, compute=0.0, wait=0.017)})
    for rank, accuracy in enumerate((0.25, 0.75)):
        values = {"val/accuracy": accuracy, "loss": 7.0}
        Path(points_path(path, rank)).write_bytes(encode(Point(step=2, time=1000.5, values=values)) + b"\n")
    with Journal(f"{path}/journal.jsonl") as journal:
        journal.write(event("settings", batch_size={"value": 64, "source": "script"}))
        journal.write(event("alert", rule="nan", message="Not a number.", severity="error"))
    return read_run(path)


def send(run, target):
    """Send all of a run; what had to be reported must be nothing."""
    said = []
    sender = Sender(run, parse_target(target), said.append)
    assert follow(sender, lambda: True)
    assert sender.close(run.status)
    assert said == []
    return sender.sent


def check(values):
    """The loss of every step, as a tool has it: {step: loss}."""
    assert {step: value for step, value in values.items() if step < STEPS} == dict.fromkeys(range(1, STEPS), 0.5)
    assert math.isnan(values[STEPS])


def read_tensorboard(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard(run):
    sent = send(run, "tensorboard")
    assert (sent.steps, sent.events) == (STEPS, 2)
    found = read_tensorboard(f"{run.path}/tensorboard")
    check(found["train/loss"])
    assert found["train/grad_norm"][1] == 2.0
    assert (found["val/accuracy"], found["log/loss"]) == ({2: 0.5}, {2: 7.0})
    assert found["speed/samples_per_second"][1] == pytest.approx(64 / 0.02)
    assert found["time/compute"][1] == pytest.approx(0.4)
    parts = ("compute", "communicate", "wait", "load", "other")
    assert sum(found[f"time/{part}"][1] for part in parts) == pytest.approx(1)


def test_tensorboard_in_another_folder(run, tmp_path):
    send(run, f"tensorboard:{tmp_path}/elsewhere")
    check(read_tensorboard(tmp_path / "elsewhere")["train/loss"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write TensorBoard files"):
        Sender(run, parse_target(f"tensorboard:{tmp_path}/file"), print)


def test_csv(run, tmp_path):
    send(run, "csv")
    with open(f"{run.path}/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    check({int(row["step"]): float(row["loss"]) for row in rows})
    assert [row["val/accuracy"] for row in rows] == ["", "0.5", "", "", ""]
    assert {*rows[0]} >= {"step", "time", "lr", "epoch", "grad_norm", "compute", "wait"}
    with pytest.raises(UserError, match="Cannot write"):
        Sender(run, parse_target(f"csv:{run.path}/run.json/x.csv"), print)


def test_parquet(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    send(run, f"parquet:{tmp_path}/x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    check(dict(zip(table["step"], table["loss"], strict=True)))


def wandb_records(path):
    """What an offline file of wandb holds: its format is that of LevelDB's log, with messages of wandb inside."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = pb.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_wandb_offline(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    send(run, "wandb:team/project")
    (path,) = Path(run.path, "wandb").glob(f"offline-run-*/run-{run_id(run)}.wandb")
    records = list(wandb_records(path))
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    check({row["step"]: float(row["train/loss"]) for row in rows if "train/loss" in row})
    assert [row["val/accuracy"] for row in rows if "val/accuracy" in row] == [0.5]
    (about,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (about.entity, about.project, about.display_name) == ("team", "project", run.name)
    text = path.read_bytes()
    assert b"batch_size" in text
    assert b"Not a number." in text


def test_wandb_that_nobody_is_logged_in_to(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError) as caught:
        Sender(run, parse_target("wandb"), print)
    assert "WANDB_MODE=offline" in caught.value.hint


# SQLAlchemy 2.1 warns about what MLflow does.
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("kind", ["database", "folder"])
def test_mlflow(run, tmp_path, monkeypatch, kind):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    uri = f"sqlite:///{tmp_path}/mlflow.db" if kind == "database" else f"{tmp_path}/mlruns"
    if kind == "folder":
        # MLflow's own word for: yes, I know that it does not look after folders any more.
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    send(run, f"mlflow:{uri}")
    if kind == "database":
        send(run, f"mlflow:{uri}")  # a second time changes nothing
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    assert found.data.params == {"batch_size": "64"}
    assert found.data.tags["shoal.alert.nan"] == "Not a number."
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert len(history) == STEPS
    check({one.step: one.value for one in history})
    assert [one.value for one in client.get_metric_history(found.info.run_id, "val/accuracy")] == [0.5]
    with pytest.raises(UserError, match="MLflow does not take this run at nowhere"):
        Sender(run, parse_target("mlflow:nowhere://me:secret@host"), print)


def test_a_folder_for_mlflow_needs_a_word_to_mlflow(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    if int(mlflow.__version__.split(".")[0]) < 3:
        pytest.skip("this MLflow still takes folders as they come")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(UserError) as caught:
        Sender(run, parse_target(f"mlflow:{tmp_path}/mlruns"), print)
    assert "MLFLOW_ALLOW_FILE_STORE=true" in caught.value.why + caught.value.hint


@pytest.mark.parametrize("name", ["a<b>", "//x", "../x", "a//b", "x/", "\u202e", "a/./b", "é"])
def test_names_that_mlflow_would_refuse(name):
    validation = pytest.importorskip("mlflow.utils.validation")
    validation._validate_metric_name(metric_name(name))


def test_trackio(run, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    send(run, "trackio:project")
    rows = SQLiteStorage.get_logs("project", run.name)
    check({row["step"]: row["train/loss"] for row in rows if "train/loss" in row})


def read_page(port):
    """The page as Prometheus' own parser reads it: {(name, labels): value}."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sorted(label for label in sample.labels.items() if label[0] != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus(run):
    pytest.importorskip("prometheus_client")
    page = KINDS["prometheus"].open(run, "0")
    rows = ScalarsReader(run.path).read_rest()
    page.write([*rows, Scalars(step=9, time=9.0, values={'val/"<acc>"\n\\': 0.25})])
    page.event(event("world", members=["0.0", "1.0", "2.0"]))
    page.event(event("alert", rank=1, rule="straggler"))
    page.event(event("alert", rank=2, rule="straggler", is_resolved=True))
    found = read_page(page.port)
    page.close("finished")
    assert math.isnan(found[("shoal_loss",)])
    assert found[("shoal_step",)] == STEPS
    assert found[("shoal_time_share", ("part", "compute"))] == pytest.approx(0.4)
    assert found[("shoal_number", ("name", 'val/"<acc>"\n\\'))] == 0.25
    assert found[("shoal_workers",)] == 3
    assert found[("shoal_events_total", ("kind", "alert"))] == 2
    assert found[("shoal_alert", ("rank", "1"), ("rule", "straggler"))] == 1
    assert found[("shoal_alert", ("rank", "2"), ("rule", "straggler"))] == 0


def test_prometheus_needs_a_port_that_is_free(run):
    pytest.importorskip("prometheus_client")
    page = KINDS["prometheus"].open(run, "127.0.0.1:0")
    with pytest.raises(UserError, match="Cannot listen"):
        KINDS["prometheus"].open(run, str(page.port))
    page.close("finished")
    assert parse_place("9000") == ("127.0.0.1", 9000)
    assert parse_place("[::1]:9000") == ("::1", 9000)
    for place in ("x", "host:", "1:99999"):
        with pytest.raises(UserError, match="not an address"):
            parse_place(place)


@contextlib.contextmanager
def server(*command):
    """The address of a server, from when on it is ready. It was told to listen at port 0."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def find():
        assert process.poll() is None, "it has ended"
        sockets = psutil.Process(process.pid).net_connections("tcp")
        for port in (each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN):
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=10):
                return f"http://127.0.0.1:{port}"
        return ""

    try:
        yield wait_for(find)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


def wait_for(look, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def query(address, expression, when):
    """What a server that speaks Prometheus' language answers: [(labels, values)]."""
    asked = urlencode({"query": expression, "time": when})
    with urlopen(f"{address}/api/v1/query?{asked}", timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    return [(one["metric"], one["values"] if "values" in one else [one["value"]]) for one in found]


@rigs.needs("prometheus")
def test_the_server_of_prometheus_scrapes_it(run, tmp_path):
    pytest.importorskip("prometheus_client")
    page = KINDS["prometheus"].open(run, "0")
    try:
        page.write([Scalars(step=9, time=9.0, values={"loss": 0.5, 'val/"<acc>"\n\\': 0.25})])
        page.event(event("alert", rank=1, rule="straggler"))
        job = {"job_name": "shoal", "static_configs": [{"targets": [f"127.0.0.1:{page.port}"]}]}
        (tmp_path / "prometheus.yml").write_text(
            json.dumps({"global": {"scrape_interval": "100ms", "scrape_timeout": "100ms"}, "scrape_configs": [job]})
        )
        options = (f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data")
        with server("prometheus", *options, "--web.listen-address=127.0.0.1:0") as address:
            ask = lambda name: query(address, name, time.time())  # noqa: E731
            ((labels, ((_, loss),)),) = wait_for(lambda: ask("shoal_loss"))
            assert (labels["run"], float(loss)) == (run.name, 0.5)
            ((labels, ((_, value),)),) = ask("shoal_number")
            assert (labels["name"], float(value)) == ('val/"<acc>"\n\\', 0.25)
            ((labels, ((_, value),)),) = ask('shoal_alert{rule="straggler"}')
            assert (labels["rank"], float(value)) == ("1", 1.0)
            page.write([Scalars(step=10, time=10.0, values={"loss": 0.25})])
            wait_for(lambda: float(ask("shoal_loss")[0][1][0][1]) == 0.25)
    finally:
        page.close("finished")


@rigs.needs("victoria-metrics")
def test_a_server_of_metrics_takes_it_by_opentelemetry(tmp_path):
    """VictoriaMetrics, which was not made by us, as the receiver: every step arrives, at its own time."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    start = round(time.time()) - 3600
    path = Home(str(tmp_path)).add_ended()
    steps = [make_step(step, time=start + step) for step in range(1, STEPS + 1)]
    write_metrics(path, {0: steps, 1: steps})
    options = ("-httpListenAddr=127.0.0.1:0", f"-storageDataPath={tmp_path}/data", "-memory.allowedBytes=64MB")
    with server("victoria-metrics", *options, "-opentelemetry.usePrometheusNaming") as address:
        done = read_run(path)
        send(done, f"opentelemetry:{address}/opentelemetry/v1/metrics")
        urlopen(f"{address}/internal/force_flush", timeout=30).close()
        ((labels, values),) = wait_for(lambda: query(address, "shoal_loss[2h]", start + 3600))
        assert (labels["run"], labels["service_name"]) == (done.name, "shoal")
        assert [(when - start, float(value)) for when, value in values] == [
            (step, 0.5) for step in range(1, STEPS + 1)
        ]
        parts = query(address, "shoal_time_share", start + STEPS)
        shares = {labels["part"]: float(value) for labels, ((_, value),) in parts}
        assert shares["compute"] == pytest.approx(0.8)
        assert sum(shares.values()) == pytest.approx(1)


@pytest.fixture
def receiver():
    """What an OTLP receiver gets, in messages of its own protocol. It refuses while `codes` has some."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = server.codes.pop(0) if server.codes else 200
            if code == 200:
                server.requests.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.requests, server.codes = [], []
        server.url = f"http://127.0.0.1:{server.server_port}/v1/metrics"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def points_of(requests):
    found = defaultdict(list)
    for request in requests:
        for resource in request.resource_metrics:
            for metric in resource.scope_metrics[0].metrics:
                found[metric.name] += metric.gauge.data_points
    return found


def test_opentelemetry(run, receiver):
    send(run, f"opentelemetry:{receiver.url}")
    found = points_of(receiver.requests)
    losses = {(point.time_unix_nano - 1000e9) / 0.02e9: point.as_double for point in found["shoal.loss"]}
    check({round(step): loss for step, loss in losses.items()})
    assert {point.attributes[1].value.string_value for point in found["shoal.time_share"]} >= {"compute", "wait"}
    resource = {
        item.key: item.value.string_value for item in receiver.requests[0].resource_metrics[0].resource.attributes
    }
    assert resource["service.instance.id"] == run.name


def test_a_tool_that_fails_is_told_of_once_and_gets_everything_when_it_works_again(run, receiver):
    said = []
    sender = Sender(run, parse_target(f"opentelemetry:{receiver.url}"), said.append)
    receiver.codes[:] = [400, 400]
    assert not sender.poll(is_over=True)
    assert not sender.poll()
    assert sender.poll()
    assert sender.close("finished")
    assert len(points_of(receiver.requests)["shoal.loss"]) == STEPS
    assert len(said) == 2
    assert "does not take numbers" in said[0]
    assert "takes numbers again" in said[1]


def test_a_step_is_given_once_all_ranks_have_it(tmp_path):
    reader = ScalarsReader(str(tmp_path))
    write_metrics(str(tmp_path), {0: make_steps(5), 1: make_steps(2)})
    assert [row.step for row in reader.read_new()] == [1, 2]
    assert reader.read_new() == []
    write_metrics(str(tmp_path), {1: make_steps(4)})
    assert [row.step for row in reader.read_new()] == [3, 4]
    assert [row.step for row in reader.read_rest()] == [5]


def test_a_worker_that_is_gone_is_not_waited_for(tmp_path):
    reader = ScalarsReader(str(tmp_path))
    write_metrics(str(tmp_path), {0: make_steps(1000), 1: make_steps(10)})
    assert len(reader.read_new()) == 1000


def test_what_an_earlier_attempt_measured_is_left_out(tmp_path):
    write_metrics(str(tmp_path), {0: make_steps(10)})
    assert [row.step for row in ScalarsReader(str(tmp_path), since=1000.1).read_rest()] == [5, 6, 7, 8, 9, 10]


def test_a_table_has_each_step_once_in_order():
    rows = [
        Scalars(step=2, time=2.0, values={"loss": 2.0}),
        Scalars(step=1, time=3.0, values={"loss": 1.0}),
        Scalars(step=2, time=4.0, values={"loss": 2.5}),
        Scalars(step=2, time=5.0, values={"accuracy": 0.5, "step": 7.0}),
    ]
    assert Table(rows).columns() == {
        "step": [1, 2],
        "time": [3.0, 4.0],
        "loss": [1.0, 2.5],
        "accuracy": [None, 0.5],
        "step_": [None, 7.0],
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tensorbord", "did you mean `tensorboard`"),
        ("", "use one of: csv"),
        ("http://user:secret@host", "use one of: csv"),
        ("csv:a\nb", "for example: `--to csv`"),
    ],
)
def test_a_place_that_is_none(text, told):
    with pytest.raises(UserError) as caught:
        parse_target(text)
    assert told in caught.value.hint
    assert "secret" not in caught.value.render()


def test_secrets_are_not_shown():
    assert str(parse_target("csv:s3://me:secret@x/y?key=1")) == "csv:s3://***@x/y?***"


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.packages])
def test_without_the_package_the_command_to_install_it_is_given(kind, monkeypatch):
    monkeypatch.setattr("shoal.observe.exporters.find_spec", lambda name: None)
    with pytest.raises(UserError, match="is not installed") as caught:
        parse_target(kind)
    assert f"pip install 'shoal[{KINDS[kind].extra}]'" in caught.value.hint


def test_no_tool_is_imported_before_it_is_used():
    code = (
        "import sys, shoal.cli, shoal.observe.send, shoal.verbs.send\n"
        "for kind in shoal.observe.exporters.KINDS.values():\n"
        "    __import__(f'shoal.observe.exporters.{kind.module}')\n"
        "print([name for name in sys.modules if name in ('wandb', 'mlflow', 'trackio', 'prometheus_client', "
        "'opentelemetry', 'tensorboard', 'pyarrow', 'numpy', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
