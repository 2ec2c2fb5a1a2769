"""A wheel, as it is built and installed, has the page of `shoal dash` inside: that of its sources, no older one."""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashing import add_run, end, serve

from shoal.testing import rigs

pytestmark = [rigs.needs("the page"), pytest.mark.slow]
pytest.importorskip("hatchling")
pytest.importorskip("starlette")

ROOT = Path(__file__).parents[2]
PAGE = "src/shoal/dash/page"


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Path]:
    """All that a wheel is made of, to change at will."""
    copy = tmp_path / "sources"
    for name in ("src", "web"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy2(ROOT / name, copy / name)
    return copy


def build(sources: Path, **env: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    done = subprocess.run(
        command, cwd=sources, env={**os.environ, **env}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (sources / "out").glob("*.whl")
    return wheel


def freshen(sources: Path) -> None:
    """Copies are as old as what they are copies of; what is built must be newer than that."""
    (sources / PAGE / "index.html").touch()


@pytest.mark.timeout(600)
def test_a_wheel_shows_its_page(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freshen(sources)
    wheel = build(sources)
    names = zipfile.ZipFile(wheel).namelist()
    built = {f"shoal/dash/page/{path.name}" for path in (sources / PAGE).iterdir()}
    assert built <= set(names)
    assert len(built) >= 4
    assert not [name for name in names if "node_modules" in name or name.startswith(("web/", "tests/"))]
    place = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run([*command, str(wheel)], check=True, timeout=300)
    # Before everything that is installed, also before this checkout.
    monkeypatch.setenv("PYTHONPATH", str(place))
    where = subprocess.run(
        [sys.executable, "-c", "import shoal; print(shoal.__file__)"], capture_output=True, text=True, check=True
    )
    assert where.stdout.startswith(str(place))
    end(add_run(tmp_path / "home", "a-run"))
    with serve(tmp_path / "home") as page:
        status, _, body = page.ask("GET", "/")
        assert status == 200
        assert b"/page/app-" in body
        for path in (place / "shoal/dash/page").iterdir():
            if path.name != "index.html":
                status, _, body = page.ask("GET", f"/page/{path.name}")
                assert (status, body) == (200, path.read_bytes())
        _, _, told = page.ask("GET", "/api/runs", Cookie=page.log_in())
        assert [row["name"] for row in told["rows"]] == ["a-run"]


@rigs.needs("npm")
@pytest.mark.timeout(900)
def test_a_page_that_is_older_than_its_sources_is_built_again(sources: Path) -> None:
    freshen(sources)
    script = sources / "web/src/main.ts"
    script.write_text(script.read_text().replace('"Skip to content"', '"Skip to what matters"'))
    later = time.time() + 60
    os.utime(script, (later, later))
    with zipfile.ZipFile(build(sources)) as wheel:
        (app,) = (name for name in wheel.namelist() if name.startswith("shoal/dash/page/app-"))
        assert b"Skip to what matters" in wheel.read(app)


def test_without_npm_a_wheel_is_built_all_the_same(sources: Path, tmp_path: Path) -> None:
    shutil.rmtree(sources / PAGE)
    (tmp_path / "bin").mkdir()
    with zipfile.ZipFile(build(sources, PATH=str(tmp_path / "bin"))) as wheel:
        names = wheel.namelist()
    assert "shoal/cli.py" in names
    assert not [name for name in names if name.startswith("shoal/dash/page/")]
