"""The page of `shoal dash` beside TensorBoard and the Ray dashboard, in one headless Chromium, over the same numbers.

What is timed is what a person waits for: from asking for the page until the first curve, or the first run, is there;
of TensorBoard, the first canvas that a curve will be in. Both servers have read their data before, and every visit is
that of a browser that has nothing in its cache. First visits, to a server that has just started and read nothing,
have rows of their own. What a job logs while the page is open carries the time of its sending: how late is it shown?
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.commands import make_metrics
from benchmarks.harness import check, interleave, ratio, say, summarize, tell_company
from shoal.dash import opened
from shoal.observe.metrics import encode, metrics_path
from shoal.observe.points import points_path

NUM_STEPS = 100_000
NUM_RUNS = 10_000
PEER_RUNS = 1000  # with 10,000 its page was busy for minutes, and no row had come
TAGS = ("loss", "lr", "epoch", "grad_norm", "samples_per_second", "step_seconds", "compute", "communicate", "wait")
IDLE_SECONDS = 30.0
LIMIT_SECONDS = 40.0
ARGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)
NUM_SENT = 40
CURVE = "line-chart canvas"
RUN = "runs-data-table tb-data-table-content-row"
RAY = "overview, Ray dashboard"
BOTH = "curve among runs, shoal"
PEERS = {
    "curve, shoal": "curve, TensorBoard",
    "runs, shoal": "runs, TensorBoard",
    BOTH: "curve, TensorBoard",
}
# When something that fits appears and stays: looked at before every frame.
WATCH = """
window.seenAt = null;
const look = () => {
  if (window.seenAt === null && document.querySelector(%r)) window.seenAt = performance.now();
  if (window.seenAt === null) requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
# A job that logs when it logs. The times between two are not those of anything that looks for news.
LIVE = """
import random, sys, time
import shoal
dice = random.Random(0)
for _ in range(int(sys.argv[2])):
    time.sleep(dice.uniform(0.5, 1.5))
    shoal.log(sent=time.time() - float(sys.argv[1]))
time.sleep(3)
"""
# What the chart of these says, and when: looked at before every frame.
SHOWN = """
window.shown = [];
const look = () => {
  const chart = [...document.querySelectorAll(".chart")].find((it) => it.querySelector("h3").textContent === "sent");
  const value = Number(chart?.querySelector(".chart-value b")?.textContent);
  if (value > (window.shown.at(-1)?.[0] ?? 0)) window.shown.push([value, Date.now() / 1000]);
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""


class Visits:
    """Visits of new browsers to pages; counts what they transfer."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.num_bytes: dict[str, list[int]] = {}
        self.painted: dict[str, list[float]] = {}

    def time(self, name: str, url: str, selector: str, cookies: list[dict[str, Any]]) -> float:
        """Seconds until what the selector means is there; 40 where it is not there by then."""
        context = self._browser.new_context(viewport={"width": 1280, "height": 900})
        try:
            context.add_cookies(cookies)
            page = context.new_page()
            page.set_default_timeout(120_000)
            network = context.new_cdp_session(page)
            received: list[int] = []
            network.send("Network.enable")
            network.on("Network.loadingFinished", lambda event: received.append(int(event["encodedDataLength"])))
            page.add_init_script(WATCH % selector)
            page.goto(url, wait_until="commit")
            seen = self._wait(page)
            say(f"  {name}: {seen:.2f} s")
            paints = page.evaluate("performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)")
            self.painted.setdefault(name, []).append(paints[0] / 1000 if paints else seen)
            self.num_bytes.setdefault(name, []).append(sum(received))
            return seen
        finally:
            context.close()

    def _wait(self, page: Any) -> float:
        from playwright.sync_api import TimeoutError as TooLong

        try:
            page.wait_for_function("it => window.seenAt !== null", timeout=1000 * LIMIT_SECONDS)
        except TooLong:
            return LIMIT_SECONDS
        return float(page.evaluate("window.seenAt")) / 1000


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    num_steps, num_runs, peer_runs = (1000, 200, 20) if is_quick else (NUM_STEPS, NUM_RUNS, PEER_RUNS)
    num_sent = 3 if is_quick else NUM_SENT
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        say(f"writing {num_steps} steps and {num_runs} runs")
        write_shoal(folder / "shoal", num_steps, num_runs)
        write_tensorboard(folder / "curve", 1, num_steps)
        write_tensorboard(folder / "runs", peer_runs, 1)
        curves = stack.enter_context(shoal_dash(folder / "shoal" / "curve"))
        runs = stack.enter_context(shoal_dash(folder / "shoal" / "runs"))
        both = stack.enter_context(shoal_dash(folder / "shoal" / "both"))
        board = stack.enter_context(tensorboard(folder / "curve", 1))
        boards = stack.enter_context(tensorboard(folder / "runs", peer_runs))
        ray = stack.enter_context(ray_dashboard()) if not is_quick else ""
        engine = stack.enter_context(sync_playwright())
        browser = engine.chromium.launch(executable_path=shutil.which("chromium"), args=list(ARGS))
        stack.callback(browser.close)
        visits = Visits(browser)
        say("visiting")
        pages = {
            "curve, shoal": (f"{curves.address}/run/long", "[data-drawn]", curves.cookies),
            "curve, TensorBoard": (f"{board}/#timeseries", CURVE, []),
            "runs, shoal": (f"{runs.address}/", "td.name a", runs.cookies),
            BOTH: (f"{both.address}/run/long", "[data-drawn]", both.cookies),
            "runs, TensorBoard": (f"{boards}/#timeseries", RUN, []),
            **({RAY: (ray, "#root *", [])} if ray else {}),
        }
        contenders = {name: partial(visits.time, name, *page) for name, page in pages.items()}
        # Readers are open and code is compiled from now on.
        interleave(contenders, 1)
        visits.num_bytes.clear()
        visits.painted.clear()
        samples = interleave(contenders, rounds)
        say("first visits")
        fresh = {
            "curve, shoal": partial(first_visit, visits, folder / "shoal" / "curve", "/run/long", "[data-drawn]"),
            "runs, shoal": partial(first_visit, visits, folder / "shoal" / "runs", "/", "td.name a"),
            BOTH: partial(first_visit, visits, folder / "shoal" / "both", "/run/long", "[data-drawn]"),
        }
        first = interleave(fresh, rounds)
        say("news of a run that goes on")
        delays = measure_news(browser, folder / "live", num_sent)
        # By then what was read for the visits is let go of.
        seconds, settle = (3.0, 1.0) if is_quick else (IDLE_SECONDS, 2.2 * opened.IDLE_SECONDS)
        idle = {"1 run": measure_idle(curves, seconds, settle), f"{num_runs} runs": measure_idle(runs, seconds, 0.0)}
    return report(samples, first, delays, visits, idle, num_steps, num_runs)


def report(
    samples: dict[str, list[float]],
    first: dict[str, list[float]],
    delays: list[float],
    visits: Visits,
    idle: dict[str, dict[str, float]],
    num_steps: int,
    num_runs: int,
) -> dict[str, Any]:
    seconds = {name: summarize(times) for name, times in samples.items()}
    seconds_first = {name: summarize(times) for name, times in first.items()}
    late = summarize(delays)
    kilobytes = {name: summarize([size / 1000 for size in sizes]) for name, sizes in visits.num_bytes.items()}
    beside = {name: ratio(samples[peer], samples[name]) for name, peer in PEERS.items()}
    beside_ray = {name: ratio(samples[RAY], samples[name]) for name in beside if RAY in samples}
    painted_ray = {name: ratio(visits.painted[RAY], visits.painted[name]) for name in beside if RAY in samples}
    return {
        "rows": [
            {
                "page": name,
                "seconds": seconds[name],
                "first paint s": summarize(visits.painted[name]),
                "transfer KB": kilobytes[name],
                "× faster than TensorBoard": beside.get(name, ""),
                "× faster than Ray": beside_ray.get(name, ""),
            }
            for name in samples
        ],
        "more": {
            "first visit, to a server that has read nothing": [
                {"page": name, "seconds": times} for name, times in seconds_first.items()
            ],
            "from shoal.log in a job until the page shows it": [{"seconds": late, "slowest": late["max"]}],
            "server, nobody looking": [{"with": name, **facts} for name, facts in idle.items()],
        },
        "checks": [
            check("curve, shoal: transfer KB", kilobytes["curve, shoal"], "≤ 300"),
            check("runs, shoal: transfer KB", kilobytes["runs, shoal"], "≤ 300"),
            *(check(f"{name}: seconds", seconds[name], "≤ 1") for name in PEERS),
            *(check(f"{name}, first visit: seconds", seconds_first[name], "≤ 1") for name in PEERS),
            check("from shoal.log until it is shown: seconds", late, "≤ 1"),
            check("the same, the slowest: seconds", _only(late["max"]), "≤ 1"),
            check("curve: times faster than TensorBoard", beside["curve, shoal"], "≥ 1"),
            check("runs: times faster than TensorBoard", beside["runs, shoal"], "≥ 1"),
            *(
                check(f"{name}: times faster than the Ray dashboard", times, "≥ 1")
                for name, times in beside_ray.items()
            ),
            *(
                check(f"{name}: first paint, times faster than the Ray dashboard", times, "≥ 1")
                for name, times in painted_ray.items()
            ),
            *(check(f"idle, {name}: MB", _only(facts["resident MB"]), "≤ 80") for name, facts in idle.items()),
            *(
                check(f"idle, {name}: % of a core", _only(facts["% of a core"]), "≤ 0.5")
                for name, facts in idle.items()
            ),
        ],
        "notes": [
            f"curve: {num_steps} steps of {len(TAGS)} numbers and more, until the first curve is drawn;",
            f"runs: {num_runs} runs, of TensorBoard a tenth of that, until the first is listed;",
            f"among runs: a home with both, {num_runs} runs and the long one;",
            f"shoal.log until shown: {len(delays)} numbers of a job under `shoal run`, by the clock of one machine,",
            "until the frame of the browser that has the number, or a later one;",
            "TensorBoard with its fast loader, when it has read everything;",
            "Ray dashboard: the overview of a Ray that does nothing, until the first words of it are there;",
            f"headless Chromium, empty cache, 1280 x 900; {LIMIT_SECONDS:.0f} s stands for that and more",
            *tell_company(),
        ],
        "samples_seconds": samples,
        "first_seconds": first,
        "news_seconds": delays,
    }


def _only(value: float) -> dict[str, float]:
    return {"median": value, "low": value, "high": value}


class Dash:
    """A `shoal dash` that runs, and the cookie that it gave us."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        first = json.loads(process.stdout.readline())
        self.process, self.address = process, first["address"]
        body = json.dumps({"token": first["login"].partition("#")[2]}).encode()
        request = urllib.request.Request(f"{self.address}/api/login", body, {"Origin": self.address})
        with urllib.request.urlopen(request) as answer:
            name, _, value = answer.headers["set-cookie"].partition(";")[0].partition("=")
        self.cookies = [{"name": name, "value": value, "url": self.address}]


@contextlib.contextmanager
def shoal_dash(home: Path) -> Iterator[Dash]:
    command = [sys.executable, "-m", "shoal", "dash", "--port", "0", "--no-open", "--json"]
    with started(command, env={**os.environ, "SHOAL_HOME": str(home)}, stdout=subprocess.PIPE, text=True) as process:
        yield Dash(process)


@contextlib.contextmanager
def tensorboard(logdir: Path, num_runs: int) -> Iterator[str]:
    """The address of a TensorBoard that has read everything."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", str(port)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started([*command, "--host", "127.0.0.1"], **quiet):
        address = f"http://127.0.0.1:{port}"
        until(lambda: len(fetch(f"{address}/data/runs")) >= num_runs, 600)
        yield address


@contextlib.contextmanager
def ray_dashboard() -> Iterator[str]:
    """The address of the dashboard of a Ray that has nothing to do; empty where it does not start."""
    code = (
        "import ray, time\n"
        "context = ray.init(include_dashboard=True, num_cpus=1, configure_logging=False, log_to_driver=False)\n"
        "print(context.dashboard_url or '', flush=True)\n"
        "time.sleep(3600)"
    )
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with started([sys.executable, "-c", code], env=env, **quiet) as process:
        told = (process.stdout.readline() if process.stdout else "").strip()
        address = f"http://{told}" if told else ""
        try:
            if address:
                until(lambda: urllib.request.urlopen(address, timeout=5).status == 200, 180)
        except TimeoutError:
            address = ""
        if not address:
            say("the Ray dashboard does not start here")
        yield address


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def until(is_there: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if is_there():
                return
        time.sleep(0.2)
    raise TimeoutError(f"not there after {seconds:.0f} s")


def first_visit(visits: Visits, home: Path, path: str, selector: str) -> float:
    """Seconds of a visit to a server that has just said that it is there."""
    with shoal_dash(home) as dash:
        return visits.time(f"first, {home.name}", dash.address + path, selector, dash.cookies)


def measure_news(browser: Any, home: Path, num_sent: int) -> list[float]:
    """Seconds from `shoal.log` in a job until the page shows that number, or a later one."""
    home.mkdir()
    script = home / "live.py"
    script.write_text(LIVE)
    start = time.time()
    with shoal_dash(home) as dash:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_cookies(dash.cookies)
        command = [sys.executable, "-m", "shoal", "run", "-n", "1", "--name", "live", str(script), str(start)]
        env = {**os.environ, "SHOAL_HOME": str(home)}
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with started([*command, str(num_sent)], env=env, **quiet) as process:
            until(lambda: (home / "runs" / "live" / "run.json").exists(), 60)
            page = context.new_page()
            page.add_init_script(SHOWN)
            page.goto(f"{dash.address}/run/live", wait_until="commit")
            process.wait(60 + 3 * num_sent)
            shown = page.evaluate("window.shown")
        context.close()
    rows = [json.loads(line) for line in Path(points_path(str(home / "runs" / "live"), 0)).read_bytes().splitlines()]
    sent = [row["values"]["sent"] for row in rows]
    # Four digits are shown. What came before the page was open is left out.
    heard = [one for one in sent if one > shown[0][0]]
    return [next(when for value, when in shown if value > 0.999 * one) - start - one for one in heard]


def measure_idle(dash: Dash, seconds: float, settle_seconds: float) -> dict[str, float]:
    """What a server takes while nobody looks: it has served, and pages are closed."""
    pid = dash.process.pid
    time.sleep(settle_seconds)
    before = cpu_seconds(pid)
    time.sleep(seconds)
    used = cpu_seconds(pid) - before
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {"resident MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6, "% of a core": 100 * used / seconds}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_shoal(folder: Path, num_steps: int, num_runs: int) -> None:
    now = time.time()
    long = folder / "curve" / "runs" / "long"
    write_facts(long, now - 3600)
    rows = (encode(make_metrics(step, now - 3600 + 0.02 * step)) for step in range(num_steps))
    Path(metrics_path(str(long), 0)).write_bytes(b"\n".join(rows) + b"\n")
    line = encode(make_metrics(0, now)) + b"\n"
    for home in ("runs", "both"):
        for number in range(num_runs):
            run = folder / home / "runs" / f"run-{number:05}"
            write_facts(run, now - 60 * (num_runs - number))
            Path(metrics_path(str(run), 0)).write_bytes(line)
    shutil.copytree(long, folder / "both" / "runs" / "long")


def write_facts(run: Path, created: float) -> None:
    run.mkdir(parents=True)
    facts = {"name": run.name, "status": "finished", "created": created, "ended": created + 60, "num_workers": 1}
    (run / "run.json").write_text(json.dumps({**facts, "command": ["shoal", "run", "train.py"]}))


def write_tensorboard(folder: Path, num_runs: int, num_steps: int) -> None:
    """The same numbers as event files, one a run."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    now = time.time()
    for number in range(num_runs):
        run = folder / f"run-{number:05}"
        run.mkdir(parents=True)
        with open(run / "events.out.tfevents.1", "wb") as file:
            writer = RecordWriter(file)
            writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            for step in range(num_steps):
                row = make_metrics(step, now + 0.02 * step)
                values = [Summary.Value(tag=tag, simple_value=float(getattr(row, tag, 1.0) or 0.0)) for tag in TAGS]
                event = Event(wall_time=row.time, step=step, summary=Summary(value=values))
                writer.write(event.SerializeToString())
            writer.flush()
