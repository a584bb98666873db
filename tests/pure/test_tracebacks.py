"""An error of all ranks is printed once; all other output is shown byte for byte."""

import random

import pytest

from multiring._launch.tracebacks import TracebackFolder, Tracebacks

DRAW = random.Random(7)  # noqa: S311 -- the same cases each time
BODY = (
    b'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n  File "b.py", line 2\n    g()\n'
)


def fed(folder: TracebackFolder, text: bytes) -> list[tuple[bytes, str]]:
    """Feed a text in random parts; return the pieces, with adjacent ones joined."""
    pieces: list[tuple[bytes, str]] = []
    while text:
        end = DRAW.randint(1, 60)
        for piece in folder.feed(text[:end]):
            if pieces and not piece.whose and not pieces[-1][1]:
                pieces[-1] = (pieces[-1][0] + piece.data, "")
            else:
                pieces.append((piece.data, piece.whose))
        text = text[end:]
    if left := folder.finish():
        pieces.append((left, ""))
    return pieces


@pytest.mark.parametrize("prefix", [b"", b"[rank1]: "])
def test_the_second_ranks_traceback_is_its_last_line(prefix: bytes) -> None:
    for _ in range(20):
        shown = Tracebacks()
        text = BODY + b"ValueError: bad\n"
        marked = b"".join(prefix + line for line in text.splitlines(keepends=True))
        assert fed(TracebackFolder(shown, "rank 0"), b"before\n" + marked + b"after\n") == [
            (b"before\n" + marked + b"after\n", "")
        ]
        second = TracebackFolder(shown, "rank 1")
        assert fed(second, b"before\n" + marked + b"after") == [
            (b"before\n", ""),
            (marked, "rank 0"),
            (b"after", ""),
        ]
        for unlike in (BODY + b"KeyError: other\n", BODY.replace(b"line 2", b"line 3") + b"ValueError: bad\n"):
            assert fed(second, unlike) == [(unlike, "")]


def test_of_one_rank_nothing_is_folded() -> None:
    folder = TracebackFolder(Tracebacks(), "rank 0")
    text = (BODY + b"ValueError: bad\n") * 3
    assert fed(folder, text) == [(text, "")]


@pytest.mark.parametrize("case", range(40))
def test_no_byte_is_lost(case: int) -> None:
    shown = Tracebacks()
    words = [
        BODY,
        b"ValueError: a\n",
        b"T",
        b"[rank0]: ",
        b"x\n",
        b"\n",
        b"  ",
        b"Traceback (most",
        b"\r",
        b"\x80",
        BODY[:70],
    ]
    for rank in range(2):
        text = b"".join(DRAW.choice(words) for _ in range(case))
        pieces = fed(TracebackFolder(shown, f"rank {rank}"), text)
        assert b"".join(data for data, _ in pieces) == text
