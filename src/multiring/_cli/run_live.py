"""The record and the page of a job, for `multiring run --record` and `--page`."""

import contextlib
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from multiring._launch import JobOptions
from multiring._launch.live_page import LivePage, PageAddress
from multiring._launch.live_record import LiveRecord
from multiring.errors import ArgumentError

if TYPE_CHECKING:
    from multiring._cli.run import LiveWishes

_FILE = "record.jsonl"  # in the folder of --log-dir


def run_live(wishes: "LiveWishes", command: list[str], job: Callable[[JobOptions], int], options: JobOptions) -> int:
    """Run a job with a record and a page, and return its exit code.

    Args:
        wishes: what the user wants.
        command: the program and its arguments.
        job: runs the job.
        options: its options.

    Raises:
        ArgumentError: the record or the page cannot be opened; no rank was started.
    """
    if wishes.token_file is not None and wishes.page is None:
        raise ArgumentError("--page-token-file without --page: want both")
    address = None if wishes.page is None else PageAddress.parse(wishes.page, wishes.token_file)
    path = wishes.record
    if path is None and options.log_dir is not None:
        path = options.log_dir / _FILE
    record = LiveRecord(path, _say)
    code = 1
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: record.end(code))
        if address is not None:
            page = LivePage(address, record.descriptor)
            stack.callback(page.close)
            _say(f"the page of this job is {page.url}, its metrics {page.url}metrics")
        record.begin(secrets.token_hex(4), _shown(command))
        code = job(replace(options, record=record, reports_steps=True))
    return code


def _shown(command: list[str]) -> str:
    """Return the program's name, without its arguments, which may have secrets."""
    names = [word for word in command if word.endswith(".py")] or command[:1]
    return Path(names[0]).name if names else ""


def _say(text: str) -> None:
    print(f"multiring: {text}", file=sys.stderr, flush=True)
