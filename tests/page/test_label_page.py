"""The page for labelling in a browser: kinds of labels, keys alone, two browsers, a reload, and a killed server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

from multiring.vision import Box, Label, Mask, Polygon, VisionProject, run_lengths_of

WAIT_MS = 200_000


class Server:
    """`multiring vision label` for a folder, on the same port each time that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "multiring", "vision", "label", str(self.folder), "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]
        self.port = int(self.address.rstrip("/").rpartition(":")[2])

    def end(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.process.pid, number)
        self.process.wait(240)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "project"
    folder.mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (120, 160, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    with VisionProject.create(folder) as project:
        project.scan()
        project.add_class("cat")
        project.add_class("dog")
    made = Server(folder)
    yield made
    made.end()


def opened(browser: Browser, server: Server, width: int, author: str = "ann") -> tuple[Page, list[str]]:
    """Return a page in a new profile, and the list of its console's errors."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    page.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
    page.on("pageerror", lambda told: errors.append(str(told)))
    page.goto(server.address)
    page.wait_for_selector("body[data-ready]")
    page.fill("#author", author)
    page.locator("#author").blur()
    page.locator("#canvas").focus()
    return page, errors


def labels(server: Server, path: str) -> Any:
    with VisionProject.open(server.folder) as project:
        found = project.labelling(path)
    return None if found is None else found.labels


def expect(server: Server, path: str, holds: Any) -> Any:
    """Return a picture's labels once a condition on them holds."""
    limit = time.monotonic() + WAIT_MS / 1000
    while not holds(found := labels(server, path)):
        assert time.monotonic() < limit, (path, found)
        time.sleep(0.05)
    return found


def place(page: Page, x: float, y: float) -> tuple[float, float]:
    """Return the browser's coordinates of a pixel of the picture."""
    found: list[float] = page.evaluate(
        "([x, y]) => { const p = new DOMPoint(x, y).matrixTransform(document.getElementById('canvas').getScreenCTM());"
        " return [p.x, p.y]; }",
        [x, y],
    )
    return found[0], found[1]


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*place(page, *start))
    page.mouse.down()
    page.mouse.move(*place(page, *end), steps=3)


def on_picture(page: Page, path: str) -> None:
    page.wait_for_function("path => document.getElementById('caption').textContent.startsWith(path)", arg=path)


@pytest.mark.parametrize("width", [1440, 390])
def test_every_kind_of_label(browser: Browser, server: Server, width: int) -> None:
    page, errors = opened(browser, server, width)
    page.click("[data-tool=box]")
    drag(page, (20, 30), (80, 90))
    page.mouse.up()
    (made,) = expect(server, "0.png", bool)
    assert isinstance(made, Box)
    assert np.allclose([made.left, made.top, made.width, made.height], [20, 30, 60, 60], atol=1)
    drag(page, (80, 90), (100, 100))  # a corner
    page.mouse.up()
    expect(server, "0.png", lambda found: found[0].width > 75)
    page.keyboard.press("2")
    expect(server, "0.png", lambda found: found[0].class_name == "dog")
    page.click("#undo")
    expect(server, "0.png", lambda found: found[0].class_name == "cat")
    page.click("#next")
    on_picture(page, "1.png")
    page.click("[data-tool=polygon]")
    for point in ((10, 10), (100, 20), (60, 100), (10, 10)):
        page.mouse.click(*place(page, *point))
    (made,) = expect(server, "1.png", bool)
    assert isinstance(made, Polygon)
    assert np.allclose(made.outlines[0], [(10, 10), (100, 20), (60, 100)], atol=1)
    page.click("#next")
    on_picture(page, "2.png")
    page.click("[data-tool=picture]")
    page.locator("#classes button").nth(1).click()
    assert expect(server, "2.png", bool) == (Label(class_name="dog"),)
    page.click("#next")
    on_picture(page, "3.png")
    page.click("#nothing")
    assert expect(server, "3.png", lambda found: found is not None) == ()
    page.click("#forget")
    assert expect(server, "3.png", lambda found: found is None) is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert errors == []


def test_keys_alone(browser: Browser, server: Server) -> None:
    page, errors = opened(browser, server, 1440)
    for key in ("b", "Enter", "2", "Shift+ArrowRight", "Control+ArrowDown"):
        page.keyboard.press(key)
    (made,) = expect(server, "0.png", lambda found: bool(found) and found[0].bounds() == (70, 45, 110, 76))
    assert made.class_name == "dog"
    for key in ("Escape", "ArrowRight"):
        page.keyboard.press(key)
    on_picture(page, "1.png")
    for key in ("g", "Enter", "Shift+ArrowRight", "ArrowRight", "Enter", "ArrowDown", "ArrowDown", "Enter", "f"):
        page.keyboard.press(key)
    (made,) = expect(server, "1.png", bool)
    assert isinstance(made, Polygon)
    page.keyboard.press("Delete")
    assert expect(server, "1.png", lambda found: found == ()) == ()
    page.keyboard.press("Control+z")
    expect(server, "1.png", bool)
    page.wait_for_function("() => document.querySelectorAll('#labels li').length === 1")
    page.keyboard.press("Control+y")
    expect(server, "1.png", lambda found: not found)
    reached = set()
    for _ in range(40):  # every control can be reached
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"author", "undo", "filter", "scan", "propose", "canvas", "newclass", "nothing"} <= reached
    assert errors == []


def test_two_browsers_at_a_time(browser: Browser, server: Server) -> None:
    one, errors = opened(browser, server, 1440, "ann")
    other, _ = opened(browser, server, 390, "ben")
    one.keyboard.press("w")
    one.keyboard.press("1")
    expect(server, "0.png", bool)
    other.keyboard.press("w")
    other.keyboard.press("2")  # on what it saw before
    other.wait_for_selector("#notice button")
    assert "ann changed this picture" in other.inner_text("#notice")
    assert labels(server, "0.png") == (Label(class_name="cat"),)
    other.reload()  # the conflict and the unsaved label are still there
    other.wait_for_selector("#notice button")
    other.click("text=Keep mine")
    assert expect(server, "0.png", lambda found: found == (Label(class_name="dog"),))
    one.keyboard.press("Control+z")
    one.wait_for_function("() => document.getElementById('notice').textContent.includes('later')")
    assert labels(server, "0.png") == (Label(class_name="dog"),)
    one.reload()
    one.wait_for_function("() => document.getElementById('labels').textContent.includes('dog')")
    assert [each for each in errors if "409" not in each] == []


def test_a_reload_in_a_drag_and_a_killed_server_lose_nothing(browser: Browser, server: Server) -> None:
    page, errors = opened(browser, server, 1440)
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    before = expect(server, "0.png", bool)
    page.keyboard.press("v")
    drag(page, (80, 60), (100, 70))
    page.reload()
    page.wait_for_selector("body[data-ready]")
    page.mouse.up()
    assert labels(server, "0.png") == before
    server.end(signal.SIGKILL)
    page.locator("#canvas").focus()
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('notice').textContent.includes('Not saved yet')")
    assert labels(server, "0.png") == before
    server.start()
    expect(server, "0.png", lambda found: len(found) == 2)
    page.wait_for_selector("#notice", state="hidden")
    page.keyboard.press("Control+z")
    expect(server, "0.png", lambda found: found == before)
    assert [each for each in errors if "ERR_CONNECTION" not in each] == []


def test_masks_are_shown_and_relabelled(browser: Browser, server: Server) -> None:
    pixels = np.zeros((120, 160), bool)
    pixels[30:90, 40:120] = True
    with VisionProject.open(server.folder) as project:
        project.set_labels("0.png", (Mask(class_name="cat", pixels=run_lengths_of(pixels)),), "import")
        project.set_labels("1.png", (), "import")
    page, errors = opened(browser, server, 1440)
    page.click("text=0.png")
    on_picture(page, "0.png")
    assert page.locator("#canvas image").count() == 2
    page.keyboard.press("s")
    page.keyboard.press("2")
    (made,) = expect(server, "0.png", lambda found: found[0].class_name == "dog")
    assert np.array_equal(made.pixels.pixels(), pixels)
    assert errors == []
