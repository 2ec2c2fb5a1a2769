"""The page of `shoal dash` in a real browser: every view, live, with many runs, long curves and hostile names."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dashing import (
    HOSTILE,
    Served,
    add_checkpoints,
    add_full_run,
    add_many,
    add_run,
    end,
    make_metrics,
    make_sample,
    serve,
)
from launching import Box, box

from shoal.observe.metrics import metrics_path
from shoal.observe.points import Point, points_path
from shoal.observe.points import encode as encode_point
from shoal.observe.system import SystemWriter
from shoal.testing import rigs
from shoal.testing.rigs.machine import AXE

__all__ = ["box"]

pytestmark = [rigs.needs("chromium", "playwright", "the page")]
playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("starlette")

ARGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)
TABS = ("", "/time", "/ranks", "/world", "/checkpoints", "/logs", "/events", "/system", "/settings")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        found = engine.chromium.launch(executable_path=shutil.which("chromium"), args=list(ARGS))
        yield found
        found.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dash")
    full = add_full_run(folder)
    add_checkpoints(full.path)
    end(full)
    other = add_run(folder, "other", num_workers=1)
    Path(metrics_path(other.path, 0)).write_bytes(make_metrics(0, 300, other.facts["created"]))
    end(other)
    for name in HOSTILE:
        hostile = add_run(folder, name, command=["shoal", "run", name, "--name", name])
        (Path(hostile.path) / "logs" / "0.log").write_text("".join(f"{each}\n" for each in HOSTILE))
        end(hostile, "failed", 1)
    return folder


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    with serve(home) as page:
        yield page


class Visitor:
    """A page that is logged in. Whatever a browser complains about fails the test."""

    def __init__(self, browser: Any, served: Served, **options: Any) -> None:
        self.served = served
        self.troubles: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.page.on("console", lambda said: self.troubles.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: self.troubles.append(dialog.message))
        self.page.goto(served.login)
        served.next_link()
        self.wait("location.pathname === '/'")

    def see(self, path: str, *, is_drawn: bool = True) -> Any:
        self.page.goto(self.served.address + path)
        if is_drawn:
            self.page.wait_for_selector("[data-drawn]")
        return self.page

    def click(self, selector: str) -> None:
        self.page.click(selector)

    def wait(self, expression: str, argument: Any = None) -> Any:
        # As a function: a text would have to be evaluated, which the policy of the page forbids.
        return self.page.wait_for_function(f"it => {expression}", arg=argument)


@contextlib.contextmanager
def visit(browser: Any, served: Served, **options: Any) -> Iterator[Visitor]:
    visitor = Visitor(browser, served, **options)
    try:
        yield visitor
        assert visitor.troubles == []
        assert visitor.page.evaluate("window.hurt") is None
    finally:
        visitor.context.close()


@pytest.fixture(scope="module")
def axe() -> Callable[[Any], list[str]]:
    """What axe finds critical or serious on a page."""
    source = Path(AXE).read_text()

    def look(page: Any) -> list[str]:
        page.evaluate(source)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']}: {node['html'][:160]}"
            for each in found["violations"]
            if each["impact"] in ("critical", "serious")
            for node in each["nodes"]
        ]

    return look


def test_the_link_lets_one_in_once(browser: Any, home: Path) -> None:
    with serve(home) as served:
        link = served.login
        with visit(browser, served) as visitor:
            assert visitor.page.get_by_role("heading", name="Runs").count() == 1
            assert "#" not in visitor.page.url
        context = browser.new_context()
        page = context.new_page()
        page.goto(link)
        page.wait_for_selector("[role=alert]")
        assert "This link has been used" in page.inner_text("main")
        page.goto(served.address)
        page.wait_for_selector("text=You are not logged in.")
        context.close()


# Cells of a row that cover each other.
COVERED = """() => [...document.querySelectorAll("tr")].flatMap((row) => {
  const boxes = [...row.cells].map((cell) => cell.getBoundingClientRect()).filter((box) => box.width);
  const isBeside = (a, b) => a.left >= b.right - 1 || a.top >= b.bottom - 1;
  const isOver = (a, b) => !isBeside(a, b) && !isBeside(b, a);
  return boxes.some((a, i) => boxes.slice(i + 1).some((b) => isOver(a, b))) ? [row.innerText] : [];
})"""
VIEWS = ("/", *(f"/run/full{tab}" for tab in TABS), "/compare?run=full&run=other")
WORDS = (
    ("/system", "No run goes on."),
    ("/run/full/stacks", "This run has ended."),
    ("/run/nothing", "There is no such run."),
    ("/elsewhere", "There is nothing at this address."),
    ("/run/full/nothing", "There is no such part of a run."),
)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_every_view_fits_and_nothing_is_wrong(browser: Any, served: Served, width: int, scheme: str) -> None:
    with visit(browser, served, viewport={"width": width, "height": 900}, color_scheme=scheme) as visitor:
        for path in VIEWS:
            page = visitor.see(path)
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{path} is too wide"
            assert page.locator(".failure").count() == 0
            assert page.evaluate(COVERED) == [], path
        for path, words in WORDS:
            visitor.see(path, is_drawn=False).wait_for_selector(f"text={words}")
        # A run that is not there is a 404, which browsers print.
        visitor.troubles = [each for each in visitor.troubles if "404" not in each]


@rigs.needs("axe-core")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_axe_finds_nothing_in_what_is_looked_at_most(
    browser: Any, served: Served, axe: Any, width: int, scheme: str
) -> None:
    with visit(browser, served, viewport={"width": width, "height": 900}, color_scheme=scheme) as visitor:
        for path in ("/", "/run/full", "/run/full/world"):
            assert not axe(visitor.see(path)), path


@pytest.mark.slow
@rigs.needs("axe-core")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark"), (1920, "dark"), (360, "light")])
def test_axe_finds_nothing_anywhere(browser: Any, served: Served, axe: Any, width: int, scheme: str) -> None:
    with visit(browser, served, viewport={"width": width, "height": 900}, color_scheme=scheme) as visitor:
        for path in VIEWS:
            assert not axe(visitor.see(path)), path
        for path, words in WORDS:
            page = visitor.see(path, is_drawn=False)
            page.wait_for_selector(f"text={words}")
            assert not axe(page), path
        visitor.troubles = [each for each in visitor.troubles if "404" not in each]


@pytest.mark.slow
@rigs.needs("axe-core")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_axe_finds_nothing_in_what_only_runs_that_go_on_have(
    browser: Any, box: Box, axe: Any, width: int, scheme: str
) -> None:
    box.write("live.py", LIVE)
    box.home.mkdir()
    process = box.start("run", "-n", "2", "--name", "live", "live.py")
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with serve(box.home) as served, visit(browser, served, **options) as visitor:
        box.wait_for(lambda: list(box.home.glob("runs/live/system-*.jsonl")))
        page = visitor.see("/system", is_drawn=False)
        page.wait_for_selector("progress")
        assert not axe(page), "/system"
        page = visitor.see("/run/live/system", is_drawn=False)
        page.wait_for_selector("table")
        assert not axe(page), "system of a run"
        page = visitor.see("/run/live/stacks", is_drawn=False)
        page.click("text=Take stacks of all ranks")
        page.wait_for_selector("h2 >> text=live.py")
        assert not axe(page), "stacks"
        page = visitor.see("/run/live/logs", is_drawn=False)
        page.wait_for_selector(".log div >> text=line")
        assert not axe(page), "logs"
        page = visitor.see("/queue", is_drawn=False)
        page.wait_for_selector("text=No service is up on this machine.")
        assert not axe(page), "/queue"
        for path, words in (("/login", "You are not logged in."), ("/login#used", "This link has been used")):
            page = visitor.see(path, is_drawn=False)
            page.wait_for_selector(f"text={words}")
            assert not axe(page), path
        visitor.troubles = [each for each in visitor.troubles if "401" not in each]
        (box.folder / "go-on").touch()
        process.communicate(timeout=60)


def test_what_the_views_say(browser: Any, served: Served) -> None:
    with visit(browser, served) as visitor:
        page = visitor.see("/run/full")
        assert page.locator(".chart h3").all_inner_texts()[:2] == ["Loss", "val/accuracy"]
        assert page.locator(".command-line code").inner_text().startswith("cd '/home/ada/my models' && shoal run")
        assert visitor.see("/run/full/time").locator(".bars:not(.whole) svg").count() == 5, "all, and four ranks"
        assert page.locator(".bars.whole svg").count() == 1, "where all of the time went"
        assert "rank 2" in page.inner_text("main")
        assert "rank 2" in visitor.see("/run/full/ranks").inner_text("p.quiet")
        page.focus(".heat canvas")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        assert page.inner_text(".card [role=status]").startswith("Rank 1, step")
        assert visitor.see("/run/full/world").locator("circle.m-bad").count() == 2
        assert "killed by signal 9" in page.inner_text("main")
        page = visitor.see("/run/full/checkpoints")
        assert page.locator("text=Damaged").count() == 1
        page.click("button[aria-label='Check every byte of step 300']")
        page.wait_for_selector("text=Whole, every byte checked")
        page = visitor.see("/run/full/settings")
        assert page.locator("table").first.inner_text().split()[4:7] == ["batch_size", "128", "script"]
        page = visitor.see("/run/full/events")
        page.select_option("select[aria-label='Kind of event']", "worker_lost")
        visitor.wait("document.querySelectorAll('tbody tr').length === 1")
        assert visitor.see("/run/full/system").locator("h2").all_inner_texts() == ["ada", "grace"]


def test_logs_are_read_back_and_searched(browser: Any, served: Served) -> None:
    with visit(browser, served) as visitor:
        page = visitor.see("/run/full/logs")
        assert page.locator(".log div").last.inner_text() == "rank 0 line 2999 green <b>plain</b>"
        count = page.locator(".log div").count()
        page.click("text=Earlier lines")
        visitor.wait("document.querySelectorAll('.log div').length > it", count)
        page.fill("input[aria-label='Search logs']", "LINE 1500")
        visitor.wait("document.querySelectorAll('.results button').length === 4")
        page.locator(".results button").nth(3).click()
        page.wait_for_selector(".log .found")
        assert page.inner_text(".log .found").startswith("rank 3 line 1500")
        assert page.input_value("select[aria-label='Rank']") == "3"


def test_curves_zoom_smooth_and_change_their_axes(browser: Any, served: Served) -> None:
    with visit(browser, served) as visitor:
        page = visitor.see("/run/full")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/series" in request.url else None)
        box = page.locator(".chart .u-over").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50, steps=5)
        with page.expect_request(lambda request: "first=" in request.url):
            page.mouse.up()
        page.wait_for_selector("text=Show all")
        assert any("first=99" in url or "first=100" in url for url in asked)
        page.click("text=Show all")
        page.focus(".plot >> nth=0")
        with page.expect_request(lambda request: "first=" in request.url):
            page.keyboard.press("+")
        page.keyboard.press("0")
        assert page.locator("button:has-text('Show all')").is_hidden()
        page.fill("input[aria-label=Smoothing]", "0.9")
        assert page.inner_text("output") == "0.90"
        page.check("label:has-text('Log scale') input")
        for axis in ("relative", "clock", "step"):
            page.select_option("select[aria-label='Horizontal axis']", axis)
            assert page.locator(".chart canvas").count() == page.locator(".chart").count()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
        visitor.wait("document.querySelector('.chart-value').textContent.startsWith('step ')")


def test_runs_are_chosen_and_compared_by_keyboard(browser: Any, served: Served) -> None:
    with visit(browser, served) as visitor:
        page = visitor.see("/")
        page.keyboard.press("/")
        page.keyboard.type("full")
        visitor.wait("document.querySelectorAll('tbody tr').length === 1")
        page.focus("input[type=checkbox]")
        page.keyboard.press("Space")
        page.fill("input[type=search]", "other")
        visitor.wait("document.querySelector('tbody')?.textContent.includes('other')")
        page.focus("input[type=checkbox]")
        page.keyboard.press("Space")
        page.focus("button.main")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('2 runs compared')")
        page.wait_for_selector(".chart")
        assert page.locator(".chart >> nth=0 >> .chart-value b").count() == 2
        page.go_back()
        page.wait_for_selector("h1:has-text('Runs')")


def test_colours_are_chosen_and_kept(browser: Any, served: Served) -> None:
    with visit(browser, served, color_scheme="light") as visitor:
        page = visitor.see("/")
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        page.select_option("select[aria-label=Colours]", "dark")
        assert page.evaluate(ground) != light
        page = visitor.see("/run/full")
        assert page.evaluate(ground) != light


def test_hostile_names_are_shown_and_do_nothing(browser: Any, served: Served) -> None:
    with visit(browser, served) as visitor:
        page = visitor.see("/")
        names = page.locator("td.name").all_inner_texts()
        assert HOSTILE[0] in names
        assert "abc\\u202edlrow" in names
        assert "red" in names
        links = [link.get_attribute("href") for link in page.locator("td.name a").all()]
        for link in links:
            if "~" in link:
                for tab in ("", "/logs", "/settings"):
                    visitor.see(link + tab, is_drawn=False)
                    page.wait_for_selector("h1 bdi")
                page.wait_for_selector("h1 bdi")
        page = visitor.see(next(link for link in links if "~" in link) + "/logs")
        assert HOSTILE[0] in page.inner_text(".log")
        assert page.locator(".log img, .log script").count() == 0
        assert page.locator("h1 bdi").count() == 1


def test_a_run_whose_folder_is_removed_while_it_is_watched(browser: Any, tmp_path: Path) -> None:
    short = add_full_run(tmp_path, "short", num_steps=20)
    with serve(tmp_path) as served, visit(browser, served) as visitor:
        page = visitor.see("/run/short")
        assert page.locator("[role=alert]").is_hidden()
        end(short)
        shutil.rmtree(short.path)
        page.wait_for_selector("text=The folder of this run was removed.")
        assert page.locator(".chart").count() > 3, "what was read stays"
        visitor.troubles = [each for each in visitor.troubles if "404" not in each]


def test_ten_thousand_runs(browser: Any, tmp_path: Path) -> None:
    add_many(tmp_path, 10_000)
    with serve(tmp_path) as served, visit(browser, served) as visitor:
        page = visitor.see("/")
        visitor.wait("document.querySelector('.head p').textContent === '10,000 runs'")
        assert page.locator("tbody tr").count() == 100
        assert page.locator("td.name").first.inner_text() == "many-09999"
        page.click("text=Next")
        visitor.wait("document.querySelector('td.name').textContent === 'many-09899'")
        page.click("th button:has-text('Run')")
        visitor.wait("document.querySelector('td.name').textContent === 'many-00000'")
        page.fill("input[type=search]", "train_7 0012")
        visitor.wait("document.querySelector('.head p').textContent.includes('shown')")
        assert page.locator("td.name").all_inner_texts() == ["many-00127"]


def test_a_hundred_thousand_steps(browser: Any, tmp_path: Path) -> None:
    long = add_run(tmp_path, "long", num_workers=1)
    Path(metrics_path(long.path, 0)).write_bytes(make_metrics(0, 100_000, long.facts["created"]))
    end(long)
    with serve(tmp_path) as served, visit(browser, served) as visitor:
        with visitor.page.expect_response(lambda answer: "series" in answer.url) as drawn:
            page = visitor.see("/run/long")
        assert page.locator(".chart canvas").count() > 5
        assert len(drawn.value.body()) < 1_000_000
        box = page.locator(".chart .u-over").first.bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 104, box["y"] + 50, steps=4)
        with page.expect_response(lambda answer: "first=" in answer.url) as zoomed:
            page.mouse.up()
        axis = json.loads(zoomed.value.body())["axes"][0]["steps"]
        # Of a range this narrow all steps are there, and not only those that were drawn before.
        assert axis == list(range(axis[0], axis[-1] + 1)) or len(axis) >= 300
        assert "100,000" in visitor.see("/run/long/ranks").inner_text("main") or page.locator("canvas").count()


LIVE = """
    import os, sys, time
    import shoal
    go_on = os.environ["BOX"] + "/go-on"
    step = 0
    while not os.path.exists(go_on):
        if int(os.environ["RANK"]) == 0:
            shoal.log({"height": float(step)}, step=step)
        print("line", step, flush=True)
        step += 1
        time.sleep(0.05)
"""


def test_a_run_that_goes_on_is_shown_as_it_goes(browser: Any, box: Box) -> None:
    box.write("live.py", LIVE)
    box.home.mkdir(parents=True, exist_ok=True)
    with serve(box.home) as served, visit(browser, served) as visitor:
        page = visitor.see("/", is_drawn=False)
        page.wait_for_selector("text=No runs yet.")
        process = box.start("run", "-n", "2", "--name", "live", "live.py")
        page.wait_for_selector("td.name >> text=live")
        page.click("td.name a")
        page.wait_for_selector(".chart")
        value = "Number(document.querySelector('.chart-value b').textContent)"
        before = page.evaluate(value)
        visitor.wait(f"{value} >= it + 5", before)
        page.click("nav.tabs >> text=Logs")
        page.wait_for_selector(".log div >> text=line")
        lines = page.locator(".log div").count()
        visitor.wait("document.querySelectorAll('.log div').length > it + 5", lines)
        page.click("nav.tabs >> text=Stacks")
        page.click("text=Take stacks of all ranks")
        page.wait_for_selector("h2 >> text=live.py")
        assert page.locator("section.card").count() == 2
        page.click("nav.tabs >> text=System")
        page.wait_for_selector("progress")
        page.click("header >> text=System")
        page.wait_for_selector("text=with workers of")
        page.go_back()
        (box.folder / "go-on").touch()
        page.wait_for_selector(".status.finished")
        process.communicate(timeout=60)


def test_what_is_measured_comes_by_itself(browser: Any, tmp_path: Path) -> None:
    """Told by the stream of news: nothing is loaded again, and nothing is asked for where nothing happens."""
    with add_run(tmp_path, "live", num_workers=1) as folder, serve(tmp_path) as served:
        path = Path(points_path(folder.path, 0))

        def log(step: int, value: float) -> None:
            with open(path, "ab") as file:
                file.write(encode_point(Point(step=step, time=time.time(), values={"height": value})) + b"\n")

        log(0, 11.0)
        with visit(browser, served) as visitor:
            page = visitor.see("/run/live")
            page.wait_for_selector(".live:not(.off)")
            page.evaluate("window.isSame = true")
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            for step in range(1, 4):
                log(step, 11.0 + step)
                visitor.wait("document.querySelector('.chart-value b').textContent === it", str(11 + step))
            assert page.evaluate("window.isSame")
            assert asked
            assert all("/api/runs/live" in url for url in asked), "the stream stays open, and the page as it is"


def test_an_empty_log_says_so_until_something_is_printed(browser: Any, tmp_path: Path) -> None:
    with add_run(tmp_path, "live", num_workers=1) as folder, serve(tmp_path) as served:
        log = Path(folder.path) / "logs" / "0.log"
        log.touch()
        with visit(browser, served) as visitor:
            page = visitor.see("/run/live/logs")
            page.wait_for_selector(".live:not(.off)")
            with page.expect_response(lambda answer: "/logs?" in answer.url):
                os.utime(log, (1, 1))  # news without a line, as when another rank prints
            page.wait_for_timeout(200)
            assert page.inner_text(".log") == "Nothing was printed."
            log.write_text("at last\n")
            page.wait_for_selector(".log div >> text=at last")
            assert page.locator(".log p").count() == 0


def test_machines_come_by_themselves(browser: Any, tmp_path: Path) -> None:
    with add_run(tmp_path, "live", num_workers=1) as folder, serve(tmp_path) as served:
        samples, now = SystemWriter(folder.path), time.time()
        samples.write(replace(make_sample("ada", now), cpu=3.0))
        with visit(browser, served) as visitor:
            asked: list[str] = []
            visitor.page.on("request", lambda request: asked.append(request.url))
            page = visitor.see("/system", is_drawn=False)
            page.wait_for_selector("text=3 of 8 cores")
            page.wait_for_selector(".live:not(.off)")
            page.wait_for_timeout(5000)
            assert sum("/api/system" in url for url in asked) <= 2, (
                "at the start, and once more when news begin to come"
            )
            samples.write(replace(make_sample("ada", now + 1), cpu=5.0))
            page.wait_for_selector("text=5 of 8 cores")
        samples.close()


def test_a_server_that_went_away_is_missed(browser: Any, home: Path) -> None:
    with serve(home) as served, visit(browser, served) as visitor:
        page = visitor.see("/")
        page.wait_for_selector(".live:not(.off)")
        served.process.terminate()
        served.process.wait(20)
        page.wait_for_selector("text=not connected, trying again")
        page.fill("input[type=search]", "x")
        page.wait_for_selector("text=The server does not answer.")
        visitor.troubles.clear()
