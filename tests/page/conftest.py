"""Tests of pages in a browser: make page-test, with Debian's chromium."""

import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

# `make page-test` installs the browser and fails where it cannot.
collect_ignore_glob = [] if shutil.which("chromium") else ["test_*.py"]


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 -- it may be missing where no page is tested

    with sync_playwright() as library:
        made = library.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield made
        made.close()
