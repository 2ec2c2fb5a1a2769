"""Runs that are sent to other tools, and watched for alerts, while they go on: real processes."""

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest
from launching import Box, box  # noqa: F401 - a fixture

from shoal.testing import Faults, rigs

TRAIN = """
    import time, torch, shoal
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    def loss(model, batch):
        time.sleep(0.02)
        shoal.log(accuracy=0.5)
        return model(batch).square().mean()
    shoal.Trainer(model, loss, optimizer, torch.ones(64, 4), batch_size=16).fit(epochs=1_000_000)
"""
NUMBERS = """
    import os, time, shoal
    step = 0
    while step < 20 or (os.path.exists("forever") and not os.path.exists("enough")):
        shoal.log({"accuracy": step / 10}, step=step)
        step += 1
        time.sleep(0.01)
"""
"""Numbers without a trainer: it starts in a moment."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def page(port: int) -> str:
    with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
    return ""


@pytest.mark.timeout(300)
def test_a_run_is_followed_and_watched(box: Box) -> None:  # noqa: F811
    """One run of two workers: a bad step, a worker that is killed, a page that is asked, a sink that hangs."""
    pytest.importorskip("prometheus_client")
    box.write("train.py", TRAIN)
    box.home.mkdir()
    words = box.folder / "alerts"
    keep = ["sh", "-c", f"cat >> {words}; echo >> {words}"]
    box.home.joinpath("alerts.toml").write_text(
        f'[[to]]\ncommand = {json.dumps(keep)}\n[[to]]\ncommand = ["sleep", "1000"]\n'
        '[[to]]\nwebhook = "http://127.0.0.1:1/hidden-word"\n'
    )
    Faults().nan(rank=1, step=6).write(str(box.folder / "faults.json"))
    port = free_port()
    targets = ("--to", "csv", "--to", f"prometheus:{port}", "--faults", "faults.json", "--name", "x")
    options = {"stderr": subprocess.STDOUT, "start_new_session": True}
    process = box.start("run", "-n", "1:2", *targets, "train.py", **options)

    def alerts(rule: str) -> list[dict[str, object]]:
        found = [json.loads(line) for line in words.read_text().splitlines() if line] if words.exists() else []
        return [alert for alert in found if alert["rule"] == rule]

    try:
        box.wait_for(lambda: 'shoal_number{name="accuracy",run="x"} 0.5' in page(port), 90)
        box.wait_for(lambda: 'shoal_loss{run="x"}' in page(port))
        assert box.run("kill", "x", "--rank", "1").returncode == 0
        box.wait_for(lambda: any(alert["is_resolved"] for alert in alerts("worker_lost")), 60)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, out
    (bad,) = [alert for alert in alerts("nan") if not alert["is_resolved"]]
    assert bad["step"] == 6
    assert bad["hint"]
    lost, back = alerts("worker_lost")
    assert (lost["rank"], lost["is_resolved"], back["is_resolved"]) == (1, False, True)
    written = [event for event in box.events() if event["kind"] == "alert"]
    assert {"nan", "worker_lost"} <= {event["data"]["rule"] for event in written}
    assert "shoal: alert: " in out
    assert out.count("alerts do not reach the webhook at 127.0.0.1") == 1
    rows = read_csv(box.only_run() / "metrics.csv")
    steps = [int(row["step"]) for row in rows if row["loss"]]
    assert steps == [*range(6), *range(7, steps[-1] + 1)]
    assert any(row["accuracy"] == "0.5" for row in rows)
    for file in box.only_run().rglob("*"):
        assert not file.is_file() or b"hidden-word" not in file.read_bytes(), file
    done = box.run("alerts", "x", "--json")
    assert {"nan", "worker_lost"} <= {alert["rule"] for alert in json.loads(done.stdout)["alerts"]}


def test_tools_that_fail_are_told_of_once_and_the_run_ends_well(box: Box) -> None:  # noqa: F811
    box.write("measure.py", NUMBERS)
    (box.folder / "file").touch()
    targets = ("--to", "csv:file/x.csv", "--to", "prometheus:nowhere", "--to", "csv:out.csv")
    done = box.run("run", *targets, "measure.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing is sent to csv:file/x.csv: Cannot write") == 1
    assert done.stderr.count("nothing is sent to prometheus:nowhere") == 1
    assert [float(row["accuracy"]) for row in read_csv(box.folder / "out.csv")] == [step / 10 for step in range(20)]


def test_a_run_is_sent_later(box: Box) -> None:  # noqa: F811
    box.write("measure.py", NUMBERS)
    assert box.run("run", "--name", "x", "measure.py").returncode == 0
    done = box.run("send", "x", "--to", "csv:a.csv", "--to", "csv:b.csv", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["run"] == "x"
    assert [(one["to"], one["numbers"], one["is_whole"]) for one in told["sent"]] == [
        ("csv:a.csv", 20, True),
        ("csv:b.csv", 20, True),
    ]
    assert (box.folder / "a.csv").read_text() == (box.folder / "b.csv").read_text()
    assert "20 numbers" in box.run("send", "x", "--to", "csv").stdout
    for args, words in (
        (("x", "--to", "prometheus"), "the run is over"),
        (("x", "--to", "csv:a.csv/b"), "Cannot write"),
        (("x",), "--to"),
        (("y", "--to", "csv"), "No run is called"),
    ):
        done = box.run("send", *args)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_early_leaves_the_numbers_and_no_process(box: Box, number: int) -> None:  # noqa: F811
    box.write("measure.py", NUMBERS)
    (box.folder / "forever").touch()
    process = box.start("run", "--to", "csv:out.csv", "measure.py", start_new_session=True)
    # The file is there, empty, as soon as it is followed.
    box.wait_for_files("out.csv")
    points = box.only_run() / "points-0.jsonl"
    box.wait_for(lambda: points.exists() and points.read_bytes().count(b"\n") > 5)
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    box.wait_for_peace()
    rows = read_csv(box.folder / "out.csv")
    assert len(rows) > 1
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))


@pytest.mark.slow
def test_a_tool_that_hangs_is_left_behind(box: Box) -> None:  # noqa: F811
    """It listens and never answers; Ctrl-C waits five seconds for it."""
    box.write("measure.py", NUMBERS)
    (box.folder / "forever").touch()
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/metrics"
        process = box.start("run", "--to", f"opentelemetry:{url}", "measure.py", start_new_session=True)
        silent.settimeout(60)
        caller, _ = silent.accept()  # it has begun to send
        with caller:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "has not taken everything within 5 s" in err
    box.wait_for_peace()


@pytest.mark.slow
@rigs.needs("prometheus")
def test_prometheus_scrapes_it(box: Box) -> None:  # noqa: F811
    """The real server, which asks every second."""
    pytest.importorskip("prometheus_client")
    box.write("measure.py", NUMBERS)
    (box.folder / "forever").touch()
    port, server_port = free_port(), free_port()
    config = box.write(
        "prometheus.yml",
        f"""
        global:
          scrape_interval: 1s
        scrape_configs:
          - job_name: shoal
            static_configs:
              - targets: ["127.0.0.1:{port}"]
        """,
    )
    process = box.start("run", "--name", "x", "--to", f"prometheus:{port}", "measure.py")
    options = {"cwd": box.folder, "env": box.env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(
        ["prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{server_port}"], **options
    )

    def ask() -> float:
        url = f"http://127.0.0.1:{server_port}/api/v1/query?query=shoal_number"
        with contextlib.suppress(OSError), urlopen(url, timeout=10) as answer:
            for result in json.load(answer)["data"]["result"]:
                if result["metric"]["name"] == "accuracy" and result["metric"]["run"] == "x":
                    return float(result["value"][1])
        return 0.0

    try:
        first = box.wait_for(ask, 60)
        box.wait_for(lambda: ask() > first, 60)
    finally:
        (box.folder / "enough").touch()
        process.communicate(timeout=60)
        server.terminate()
        server.wait(30)
