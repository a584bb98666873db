"""The bench's forecast of its own run time."""

import pytest

from multiring._cli.forecast import ForecastPrinter, in_words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (40, "40 s"), (89, "89 s"), (91, "2 minutes"), (3600, "60 minutes")]
)
def test_times_are_said_as_people_do(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_what_is_left_is_what_the_first_turn_took_times_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("multiring._cli.forecast.time.monotonic", lambda: now[0])
    told: list[str] = []
    shown: list[str] = []
    made = ForecastPrinter(7, told.append, shown.append)
    made.begin(14, 70.0)
    for text, took_s in (("verifying", 50.0), ("alternation 1 of 7: a", 4.0), ("alternation 1 of 7: b", 6.0)):
        made.record(text)
        now[0] += took_s
    made.record("alternation 2 of 7: b")
    made.record("alternation 2 of 7: a")
    assert told == ["14 jobs: about 70 s", "about 60 s left"]
    assert len(shown) == 5


def test_of_what_is_short_nothing_is_said() -> None:
    told: list[str] = []
    made = ForecastPrinter(3, told.append, None)
    made.begin(3, 8.0)
    for turn in (1, 2, 3):
        made.record(f"alternation {turn} of 3: a")
    assert told == []
