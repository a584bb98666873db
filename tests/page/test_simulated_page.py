"""The page of a prediction in a browser, opened as a file: two widths, long names, no network."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from tests.support.told_values import told_values, value_at

from multiring._cli import main
from multiring._cli.simulated_page import page_of

WAIT_MS = 200_000
STEP = ["simulate", "--topology", "p5", "--model", "vgg16", "--batch-per-rank", "64", "--rate", "2500"]
HOSTS = ["--failures-per-hour", "0.01", "--restart-seconds", "300"]
LONG = "<b>" + "name" * 60

Opened = tuple[Page, list[str]]


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multiring._cli.simulate.show", said.append)
        assert main([*STEP, "--ranks", "1,8,32,256", *HOSTS, "--json"]) == 0
    found: dict[str, Any] = json.loads(said[0])
    return found


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Callable[[dict[str, Any], int], Opened]:
    """Return a function that opens the page of some values, with what went wrong: errors, and anything loaded."""

    def opening(values: dict[str, Any], width: int) -> Opened:
        file = tmp_path / "page.html"
        file.write_text(page_of(values), encoding="utf-8")
        page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
        page.set_default_timeout(WAIT_MS)
        wrong: list[str] = []
        page.on("console", lambda told: wrong.append(told.text))
        page.on("pageerror", lambda told: wrong.append(str(told)))
        known = {file.as_uri(), "data:,"}
        page.on("request", lambda asked: None if asked.url in known else wrong.append(asked.url))
        page.goto(file.as_uri())
        return page, wrong

    return opening


def overflow(page: Page) -> int:
    found: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found


@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_shows_the_values(
    opened: Callable[[dict[str, Any], int], Opened], values: dict[str, Any], width: int
) -> None:
    page, wrong = opened(values, width)
    # The browser's own reading of the page, not that of the test's parser.
    shown = page.evaluate("[...document.querySelectorAll('data')].map((each) => [each.dataset.of, Number(each.value)])")
    assert len(shown) == len(told_values(page_of(values))) > 60
    for path, value in shown:
        assert value == value_at(values, path)
    assert page.locator("data:visible").count() == len(shown)
    assert page.evaluate("JSON.parse(document.getElementById('values').textContent)") == values
    assert page.locator("svg circle").count() == 2 * len(values["steps"])
    parts = page.locator(".bar").first
    exposed = parts.locator(".exposed").evaluate("each => each.getBoundingClientRect().width")
    whole = parts.evaluate("each => each.getBoundingClientRect().width")
    last = values["steps"][-1]
    assert exposed / whole == pytest.approx(last["exposed_s"] / last["step_s"], abs=0.01)
    assert page.locator(".buckets i").count() == len(last["buckets"])
    assert overflow(page) <= 0
    assert wrong == []


@pytest.mark.parametrize("width", [1440, 390])
def test_long_names_fit(opened: Callable[[dict[str, Any], int], Opened], values: dict[str, Any], width: int) -> None:
    sources = {LONG: LONG, "a": LONG}
    page, wrong = opened(
        {**values, "training": LONG, "title": LONG, "remarks": [LONG] * 3, "sources_of_topology": sources}, width
    )
    page.locator("summary").click()
    assert page.locator("li").count() == 2
    assert page.locator("h1").inner_text() == f"{LONG} on {LONG}"
    assert overflow(page) <= 0
    assert wrong == []
