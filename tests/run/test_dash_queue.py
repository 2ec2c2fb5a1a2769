"""The Queue page of `shoal dash` in a real browser, with a real service behind it."""

import os
from pathlib import Path
from typing import Any

import pytest
from dashing import serve
from served import serving
from test_dash_page import axe, browser, visit

from shoal.testing import rigs

__all__ = ["axe", "browser"]

pytestmark = [rigs.needs("chromium", "playwright", "the page"), pytest.mark.slow]

NAMES = ("<img src=x onerror=window.hurt=1>", "<script>window.hurt=1", "שלום-עולם", "n" * 200, "a b&c=d#e?f")
SHOTS = os.environ.get("SHOAL_TEST_SHOTS", "")


def test_without_a_service_the_page_says_how_to_start_one(browser: Any, tmp_path: Path) -> None:
    with serve(tmp_path) as page, visit(browser, page) as visitor:
        shown = visitor.see("/queue")
        assert "No service is up on this machine." in shown.inner_text("#view")
        assert "shoal up" in shown.inner_text("#view")


def test_jobs_nodes_people_and_shares_live(
    browser: Any, axe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    with serving(tmp_path) as daemon, daemon.client() as client, serve(tmp_path) as page:
        with visit(browser, page) as visitor:
            shown = visitor.see("/queue")
            assert "The queue is empty." in shown.inner_text("#view")
            for name in NAMES:
                client.submit("nothing.py", dir=str(tmp_path), name=name, held=True, env={"SECRET": "x1y2z3"})
            node = client.nodes()["nodes"][0]["node"]
            client.drain(node, "<b onclick=window.hurt=1>dust</b>")
            client.put_person("ben", role="viewer", max_jobs=3)
            visitor.wait(f"document.querySelector('#view').dataset.drawn === '{len(NAMES)}'")
            visitor.wait("document.querySelector('#view').innerText.includes('ben')")
            text = shown.inner_text("#view")
            assert all(name in text for name in NAMES)
            assert "<b onclick=window.hurt=1>dust</b>" in text
            assert "draining" in text
            assert "shoal release 1" in text
            assert "x1y2z3" not in shown.content()
            assert axe(shown) == []
            shown.keyboard.press("/")
            shown.keyboard.type("שלום")
            visitor.wait("document.querySelector('#view').dataset.drawn === '1'")
            shown.keyboard.press("Control+a")
            shown.keyboard.type("nobody has this")
            visitor.wait("document.querySelector('#view').innerText.includes('No job fits.')")
        for width, scheme in ((1280, "light"), (360, "dark")):
            options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
            with visit(browser, page, **options) as visitor:
                shown = visitor.see("/queue")
                assert shown.evaluate("document.documentElement.scrollWidth") <= width
                assert axe(shown) == []
                if SHOTS:
                    shown.screenshot(path=f"{SHOTS}/queue-{width}-{scheme}.png", full_page=True)
        with visit(browser, page) as visitor:
            shown = visitor.see("/queue")
            daemon.kill()
            visitor.wait("document.querySelector('#view').innerText.includes('does not answer')")
            daemon.start()
            visitor.wait("document.querySelector('#view').innerText.includes('ben')")
