"""Sources that fail briefly are retried within bounds; error messages contain no secrets."""

import errno
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import pytest
from benchmarks.evidence.data_files.server import serving
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from multiring.data import Dataset
from multiring.data.caching.filesystem import CachingFileSystem
from multiring.data.readers.retrying import (
    TRIES,
    ShortAnswerError,
    asked_again,
    is_passing,
    redacted,
    secrets_of,
    without_secrets,
)
from multiring.data.readers.storage import open_storage
from multiring.errors import ArgumentError, DataError


def answered(status: int) -> Exception:
    information: Any = None
    return aiohttp.ClientResponseError(information, (), status=status)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((answered(each), True) for each in (408, 429, 500, 502, 503, 504)),
        *((answered(each), False) for each in (400, 401, 403, 404, 410, 416)),
        (aiohttp.ServerDisconnectedError(), True),
        (aiohttp.ClientPayloadError(), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (ShortAnswerError(), True),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (OSError(errno.EIO, "x"), False),
        (ValueError(), False),
    ],
    ids=repr,
)
def test_what_may_pass(error: Exception, passes: bool) -> None:  # noqa: FBT001
    assert is_passing(error) is passes


def failing(times: int, error: Callable[[], Exception]) -> tuple[Callable[[], str], list[int]]:
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        if len(asked) <= times:
            raise error()
        return "it"

    return ask, asked


def test_a_source_is_asked_again_later_and_later_but_not_for_ever() -> None:
    pauses: list[float] = []
    ask, asked = failing(3, lambda: answered(503))
    assert asked_again(ask, time.monotonic() + 60, pauses.append) == "it"
    assert len(asked) == 4
    assert pauses[0] < pauses[2]
    ask, asked = failing(99, lambda: answered(503))
    with pytest.raises(aiohttp.ClientResponseError):
        asked_again(ask, time.monotonic() + 60, pauses.append)
    assert len(asked) == TRIES
    ask, asked = failing(99, lambda: answered(503))
    with pytest.raises(aiohttp.ClientResponseError):
        asked_again(ask, time.monotonic(), pauses.append)
    assert len(asked) == 1, "it was asked again after the deadline"
    ask, asked = failing(99, lambda: answered(404))
    with pytest.raises(aiohttp.ClientResponseError):
        asked_again(ask, time.monotonic() + 60, pauses.append)
    assert len(asked) == 1, "a permanent error was retried"


PLAIN = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=6, max_size=12)
# Passwords may contain unquoted special characters.
PASSWORDS = st.tuples(PLAIN, st.sampled_from(["", ":", "@", "/", "?", "#", "%40", "&"]), PLAIN).map("".join)
SCHEMES = st.sampled_from(["http", "s3", "HTTPS", "sftp", "multiring::http", "zip://a.csv::https", "simplecache::s3"])


@given(scheme=SCHEMES, user=PLAIN, password=PASSWORDS, query=PLAIN, path=st.sampled_from(["", "/a", "/a/b@c.tar"]))
def test_no_secret_of_a_url_is_shown(scheme: str, user: str, password: str, query: str, path: str) -> None:
    for url in (
        f"{scheme}://{user}:{password}@host.org:8080{path}",
        f"{scheme}://host.org{path}?X-Signature={query}&b=1",
        f"{scheme}://{user}:{password}@host.org{path}?token={query}",
    ):
        shown = without_secrets(url)
        assert query not in shown or "?" not in url
        told = redacted(f"403, url='{url}', failed for {url}", secrets_of(url))
        for part in password.replace("%40", "@").replace("/", "@").replace("?", "@").replace("#", "@").split("@"):
            if f"{user}:" in url and len(part) >= 6 and part not in "host.org8080a/b@c.tar":
                assert part not in shown
                assert part not in told
        if "X-Signature" in url or "token=" in url:
            assert query not in told


@pytest.mark.parametrize(
    "url",
    ["http://host/a@b.tar", "s3://bucket/key with space", "http://h:80/a@b", "http://[::1]:8/x", "file:///a@b", "a@b"],
)
def test_what_is_not_secret_stays(url: str) -> None:
    assert without_secrets(url) == url


@pytest.mark.parametrize("url", ["http:/user:hunter22@host/x", "http//host/x?sig=hunter22", "user:hunter22@host:x"])
def test_a_mistyped_urls_secrets_are_not_shown(url: str) -> None:
    with pytest.raises(ArgumentError, match="no data set at ") as caught:
        open_storage(url)
    assert "hunter22" not in str(caught.value)


def everything_in(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error.__cause__) + repr(error.__context__)


@pytest.mark.parametrize("status", [403, 404])
@pytest.mark.parametrize("form", ["http://user:hunter22@{}/f", "http://{}/f?X-Amz-Signature=hunter22"])
def test_a_sources_error_has_no_secret_not_even_in_its_cause(form: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with serving(tmp_path) as server:
        url = form.format(server.url.partition("//")[2])
        server.status, server.fails = status, 99
        with pytest.raises(DataError) as caught:
            open_storage(url).read_into("", 0, memoryview(bytearray(5)))
        assert "hunter22" not in everything_in(caught.value)
        system = CachingFileSystem(target_protocol="http", cache=str(tmp_path / "c"))
        with pytest.raises(OSError, match="/f") as found:
            system.cat_file(url)
        assert "hunter22" not in everything_in(found.value)
    unknown = form.format("host").replace("http", "NONE")
    with pytest.raises(ArgumentError) as none:
        Dataset(unknown)
    assert "hunter22" not in everything_in(none.value)


def test_an_error_says_how_often_its_source_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring.data.readers.retrying._FIRST_S", 0.001)
    (tmp_path / "f").write_bytes(b"12345")
    with serving(tmp_path) as server:
        server.status, server.fails = 500, 99
        with pytest.raises(DataError, match=f"ClientResponseError: 500, .*, asked {TRIES} times"):
            open_storage(f"{server.url}/f").read_into("", 0, memoryview(bytearray(5)))


def test_a_server_without_ranges_gives_the_piece_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)))
    with serving(tmp_path) as server:
        server.has_ranges = False
        storage = open_storage(f"{server.url}/f")
        assert storage.size("") == 256
        out = bytearray(9)
        storage.read_into("", 100, memoryview(out))
        assert bytes(out) == bytes(range(100, 109))
        system = CachingFileSystem(target_protocol="http", cache=str(tmp_path / "c"))
        assert system.cat_file(f"{server.url}/f", 7, 12) == bytes(range(7, 12))


def test_a_source_that_tells_no_size_is_named(tmp_path: Path) -> None:
    system = CachingFileSystem(fs=Sizeless(), cache=str(tmp_path / "c"))
    system.fs.pipe("/sizeless", b"abc")
    for read in (lambda: system.cat_file("/sizeless"), lambda: system.open("/sizeless")):
        with pytest.raises(OSError, match="/sizeless: the source does not report the file's size"):
            read()


class Sizeless(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """Files of unknown size, as from a server that sends in chunks."""

    def info(self, path: str, **options: Any) -> Any:
        """Return the file's description without its size."""
        return {**super().info(path, **options), "size": None}


def test_a_reading_outlives_some_errors_of_its_server(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    fsspec.register_implementation("multiring", CachingFileSystem, clobber=True)
    with serving(tmp_path) as server:
        out = bytearray(5)
        server.status, server.fails = 503, 2
        open_storage(f"{server.url}/f").read_into("", 0, memoryview(out))
        assert bytes(out) == b"12345"
        server.status, server.fails = 500, 2
        with fsspec.open(f"multiring::{server.url}/f", "rb", multiring={"cache": str(tmp_path / "c")}) as file:
            assert file.read() == b"12345"
