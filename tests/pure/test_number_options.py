"""Every option of the command line that takes a number refuses what is none, or is out of its bounds, in one message.

The options are found in the parsers, so that a new option is tried, too. The lines are parsed, and no command begins.
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from multiring import _cli as cli
from multiring._cli import parsed
from multiring._cli.number_option import NumberOption
from multiring.errors import ArgumentError

HUGE = "1" + "0" * 30  # a whole number that no 64 bits hold
PROBES = ("nan", "inf", "-1", "0", "1e30", HUGE, "x", "")
# What the number 0 means for the options that take it. None of the other probes is right anywhere, but for those below.
ZERO = {
    "--autotune-bayes-opt-max-samples": "no effect",
    "--autotune-gaussian-process-noise": "no effect",
    "--autotune-steps-per-sample": "no effect",
    "--autotune-warmup-samples": "no effect",
    "--blacklist-cooldown-range": "no pause",
    "--cache": "nothing is kept",
    "--cache-capacity": "no effect",
    "--channel-axis": "the first axis",
    "--commit-seconds": "a commit takes no time",
    "--cycle-time-ms": "no effect",
    "--delay": "no request waits for others",
    "--drain": "nothing is run before",
    "--elastic-timeout": "the hosts have to be there",
    "--failures-per-hour": "hosts do not fail",
    "--fusion-threshold-mb": "no effect",
    "--go-on-seconds": "at once",
    "--gpus": "none",
    "--grace": "ranks are killed at once",
    "--keep": "all files are removed",
    "--max-restarts": "none",
    "--need-files": "none are needed",
    "--need-memory": "none is needed",
    "--need-shm": "none is needed",
    "--node-rank": "the first node",
    "--pool-mib": "no pool",
    "--quota": "the cache itself tells how much it needs",
    "--reset-limit": "none",
    "--restart-seconds": "at once",
    "--seed": "a seed",
    "--shard": "each sample has a shard",
    "--shuffle": "a seed",
    "--stall-check-shutdown-time-seconds": "never",
    "--stdin": "the first rank",
    "--thread-affinity": "no effect",
    "--warmup": "none",
    "vision label --port": "a free one",
    "vision serve --port": "a free one",
    "vision serve --threads": "one for each core",
}
NEGATIVE = {"--channel-axis": "the last axis", "--seed": "a seed", "--shuffle": "a seed"}


class Found(NamedTuple):
    """An option of a command, and a command line that is right but for the option."""

    command: str
    action: argparse.Action
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name that a message has to have."""
        return self.action.option_strings[0]

    def takes(self, probe: str) -> bool:
        """Return whether the value is right."""
        known = {"0": ZERO, "-1": NEGATIVE}.get(probe, {})
        return any(name in known or f"{self.command} {name}" in known for name in self.action.option_strings)


def parsers_of(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield each parser without parsers below, with the words that lead to it."""
    below = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not below:
        yield parser, words
    for action in below:
        for name, each in action.choices.items():
            yield from parsers_of(each, (*words, name))


def required_by(parser: argparse.ArgumentParser, but: argparse.Action) -> Iterator[str]:
    """Yield words for what a command line has to have, besides one option and the words at its end."""
    for action in parser._actions:
        if action.required and action is not but and action.nargs != argparse.REMAINDER:
            yield from action.option_strings[:1]
            yield str(next(iter(action.choices))) if action.choices else "1024"


def is_number(action: argparse.Action) -> bool:
    """Return whether an option takes a number: its type makes one of a text."""
    if isinstance(action.type, NumberOption):
        return True
    for text in ("1", "0.5", "64MiB"):
        try:
            made = action.type(text) if callable(action.type) else text
        except (ValueError, argparse.ArgumentTypeError):
            continue
        if isinstance(made, int | float) and not isinstance(made, bool):
            return True
    return False


@pytest.fixture(scope="module")
def options() -> list[Found]:
    top = argparse.ArgumentParser()
    commands: Any = top.add_subparsers()
    for name in cli.COMMANDS:
        cli.COMMANDS[name].add_arguments(commands.add_parser(name))
    return [
        Found(" ".join(words), action, (*words, *required_by(parser, action)))
        for parser, words in parsers_of(top, ())
        for action in parser._actions
        if action.option_strings and is_number(action)
    ]


def outcome_of(found: Found, probe: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command line with this value is told; nothing if it is taken."""
    count = found.action.nargs if isinstance(found.action.nargs, int) else 1
    command, after = found.words[: len(found.command.split())], found.words[len(found.command.split()) :]
    line = [*command, found.name, *[probe] * count, *after]
    try:
        parsed(line)
    except SystemExit as end:
        told = capsys.readouterr().err.strip().rpartition("\n")[2]
        return told if end.code == 2 else f"exit code {end.code}"
    except ArgumentError as error:
        return str(error)  # `main` shows it in one line, and returns 2
    return ""


def is_shown(probe: str, told: str) -> bool:
    """Return whether a message has the value, or what is left of it as a number."""
    if probe in {"", "x"}:
        return repr(probe) in told
    return probe in told or f" {float(probe):g}:" in told


def test_wrong_numbers_are_refused_in_one_message(options: list[Found], capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for found in options:
        for probe in PROBES:
            told = outcome_of(found, probe, capsys)
            where = f"{found.command} {found.name} {probe!r}"
            if found.takes(probe):
                wrong += [f"{where}, which is right: {told}"] * bool(told)
            elif not told:
                wrong.append(f"{where}: taken")
            elif found.name not in told or not is_shown(probe, told) or ": want " not in told:
                wrong.append(f"{where}: {told!r} has no option, no value or nothing that is wanted")
    assert not wrong, "\n".join(wrong)
    assert len(options) > 100, [found.name for found in options]


def test_the_table_has_no_option_that_is_gone(options: list[Found]) -> None:
    names = {
        name for found in options for own in found.action.option_strings for name in (own, f"{found.command} {own}")
    }
    assert {*ZERO, *NEGATIVE} <= names


def test_numbers_have_bounds(options: list[Found]) -> None:
    """A plain `int` or `float` takes NaN, infinity and negative numbers, of which each command would have to think."""
    assert not [f"{found.command} {found.name}" for found in options if found.action.type in {int, float}]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "--seconds", "nan"], "--seconds nan: want a number of seconds above 0, at most 86400"),
        (["data", "bench", "URL", "--workers", "0"], "--workers 0: want a whole number, 1 to 65536"),
        (["horovodrun", "-np", "0", "true"], "-np 0: want a whole number, 1 to 65536"),
    ],
)
def test_the_command_ends_with_2(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"multiring: {told}\n"
