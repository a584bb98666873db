"""The page of a running job in a browser: two widths, hostile names, a token, the end of the job."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

WAIT_MS = 200_000
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"
PROGRAM = f"""
import math, sys, time
from pathlib import Path
import numpy as np
import multiring

group = multiring.init()
step, there = 0, Path(sys.argv[1])
while True:
    step += 1
    more = np.array([there.exists()], np.float32)
    group.all_reduce(more)
    loss = math.nan if step % 7 == 3 else 2 / step
    huge = 1.7e308 if step % 2 else -1.7e308
    multiring.log_metrics(step=step, loss=loss, huge=huge, **{{{HOSTILE!r}: 1.0, "long " + "name" * 23: step}})
    if not more[0]:
        break
    time.sleep(0.02 * (1 + (group.rank == 3)))
"""


class WatchedJob:
    """A job of four ranks with a page, which takes steps until `end`."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "train.py").write_text(PROGRAM)
        self._there = folder / "there"
        self._there.touch()
        command = [sys.executable, "-m", "multiring", "run", "-n", "4", "--page", "0", *options, "--", sys.executable]
        self.process = subprocess.Popen(
            [*command, "train.py", str(self._there)], cwd=folder, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        said = ""
        while "its metrics" not in said:
            said = self.process.stderr.readline()
            assert said
        self.address = said.split("this job is ")[1].split(",")[0]

    def end(self) -> None:
        self._there.unlink(missing_ok=True)
        self.process.communicate(timeout=240)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedJob]:
    made = WatchedJob(tmp_path_factory.mktemp("job"))
    yield made
    made.end()


def opened(browser: Browser, address: str, width: int) -> tuple[Page, list[str]]:
    """Return the page in a new profile, and the list of its console's errors."""
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    page.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    page.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
    page.on("pageerror", lambda told: errors.append(str(told)))
    page.goto(address)
    return page, errors


def overflow(page: Page) -> int:
    found: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found


@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_shows_the_job(browser: Browser, job: WatchedJob, width: int) -> None:
    page, errors = opened(browser, job.address, width)
    page.wait_for_function("() => document.querySelectorAll('#ranks .rank').length === 4")
    page.wait_for_function("() => [...document.querySelectorAll('.bar')].every((bar) => bar.title.includes('compute'))")
    # Ranks 0 to 2 wait for the slow one.
    page.wait_for_function(
        "() => [0, 1, 2].every((rank) => document.querySelectorAll('#ranks .waiting')[rank].offsetWidth > 10)"
    )
    assert page.locator("#ranks .waiting").nth(3).evaluate("each => each.offsetWidth") < 60
    page.wait_for_function("() => document.querySelectorAll('#curves path').length === 4")
    assert all("NaN" not in (each.get_attribute("d") or "") for each in page.locator("#curves path").all())
    assert HOSTILE in page.locator("#curves-part").inner_text()
    assert page.locator("img").count() == 0
    assert page.title() == "train.py - multiring"
    assert page.locator("#program").inner_text() == "train.py"
    assert "4 of 4" in page.locator("#figures").inner_text()
    assert overflow(page) <= 0
    assert errors == []


def test_a_token_opens_the_page(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("a-token-of-enough-characters")
    job = WatchedJob(tmp_path, "--page-token-file", str(file))
    page, errors = opened(browser, job.address, 390)
    page.wait_for_selector("#token:visible")
    assert errors == []
    page.fill("#token", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('refusal').textContent.includes('not the token')")
    errors.clear()  # the browser tells of the refusal
    page.fill("#token", "a-token-of-enough-characters")
    page.keyboard.press("Enter")
    page.wait_for_selector("body[data-ready]")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert not page.locator("#door").is_visible()
    assert errors == []
    job.end()
    page.wait_for_function("() => document.getElementById('state').textContent.startsWith('no answer')")


def test_many_ranks_fit_and_a_lost_one_is_seen(browser: Browser, job: WatchedJob) -> None:
    page, errors = opened(browser, job.address, 390)
    page.wait_for_function("() => [...document.querySelectorAll('.bar')].every((bar) => bar.title.includes('compute'))")
    page.wait_for_function("() => document.querySelectorAll('#curves path').length === 4")
    told = json.loads(page.evaluate("fetch('/api/job').then((answer) => answer.text())"))
    rank = told["ranks"][0]
    told["ranks"] = [{**rank, "rank": number, "host": "h" * 200, "generation": 2} for number in range(64)]
    told["ranks"][5] |= {"ended": "killed by SIGKILL"}
    rail = {"rail": 0, "up": 1, "connections": 2, "carried_bytes": 1 << 60, "busy_s": 0.0}
    told["ranks"][6] |= {"idle_s": 7e9, "rails": [rail]}
    told |= {"code": 1, "starts": 3, "program": "p" * 3000, "texts": [[time.time(), "t" * 2000], [0, HOSTILE]]}
    page.route("**/api/job", lambda route: route.fulfill(json=told))
    page.wait_for_function("() => document.querySelectorAll('#ranks .rank').length === 64")
    page.wait_for_function("() => document.querySelectorAll('#rails li').length === 1")
    assert "killed by SIGKILL" in page.locator("#ranks .rank").nth(5).inner_text()
    assert "no step for" in page.locator("#ranks .rank").nth(6).inner_text()
    assert "1 of 2 connections up" in page.locator("#rails").inner_text()
    assert "63 of 64" in page.locator("#figures").inner_text()
    assert page.locator("#state").inner_text() == "ended with exit code 1"
    assert overflow(page) <= 0
    page.set_viewport_size({"width": 1440, "height": 900})
    assert overflow(page) <= 0
    assert errors == []
