"""The command line: what it accepts, and how it says no."""

import runpy
import sys
import threading
from pathlib import Path

import pytest

from multiring import cli
from multiring.cli import main
from multiring.cli import run as run_command
from multiring.errors import ArgumentError, StateError
from multiring.launch import run_local
from multiring.version import VERSION


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int, Path | None, bool]]:
    made: list[tuple[list[str], int, Path | None, bool]] = []

    def record(command: list[str], ranks: int, *, log_dir: Path | None, horovod: bool) -> int:
        made.append((command, ranks, log_dir, horovod))
        return 7

    monkeypatch.setattr(run_command, "run_local", record)
    return made


@pytest.mark.parametrize(
    ("argv", "call"),
    [
        (["-n", "2", "python", "x.py"], (["python", "x.py"], 2, None, False)),
        (["-n2", "--", "prog", "-n", "3", "--", "x"], (["prog", "-n", "3", "--", "x"], 2, None, False)),
        (["--log-dir", "d", "-n", "1", "prog", "--log-dir", "e"], (["prog", "--log-dir", "e"], 1, Path("d"), False)),
        (["--horovod", "-n", "2", "python", "x.py", "--horovod"], (["python", "x.py", "--horovod"], 2, None, True)),
    ],
)
def test_run_hands_the_command_on_as_it_is(
    calls: list[object], argv: list[str], call: tuple[list[str], int, Path | None, bool]
) -> None:
    assert main(["run", *argv]) == 7
    assert calls == [call]


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_ranks_that_makes_no_job(capsys: pytest.CaptureFixture[str], count: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["run", "-n", count, "true"])
    assert exit_.value.code == 2
    assert "argument -n" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["walk"], ["run", "true"], ["run", "-n", "2", "--nonsense", "true"]])
def test_usage_errors_exit_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2


def test_errors_are_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2"]) == 2
    assert capsys.readouterr().err == "multiring: no command to run\n"


def test_a_misspelt_setting_is_found_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIRING_RNAK", "1")
    assert main(["run", "-n", "2", "true"]) == 2
    assert "unknown setting MULTIRING_RNAK='1'" in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_127(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "no-such-command"]) == 127
    assert "command not found: 'no-such-command' on PATH (" in capsys.readouterr().err
    assert main(["run", "-n", "2", "./no/such/command"]) == 127
    assert capsys.readouterr().err == "multiring: command not found: './no/such/command'\n"


def test_a_file_that_is_no_program_is_126(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch(mode=0o644)
    for path in (plain, tmp_path):
        assert main(["run", "-n", "2", str(path)]) == 126
        assert f"cannot execute '{path}'" in capsys.readouterr().err


def test_another_system_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["run", "-n", "2", "true"]) == 2
    assert "works on Linux only, this is darwin" in capsys.readouterr().err


def test_run_local_checks_what_the_command_line_cannot_get_wrong() -> None:
    with pytest.raises(ArgumentError, match="cannot run 0 ranks"):
        run_local(["true"], 0)
    errors: list[StateError] = []

    def elsewhere() -> None:
        try:
            run_local(["true"], 1)
        except StateError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"multiring {VERSION}\n"


def test_python_m_multiring_is_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["multiring", "run", "-n", "2", "no-such-command"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("multiring", run_name="__main__")
    assert exit_.value.code == 127


def test_every_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert name in capsys.readouterr().out


def test_the_set_of_flags_is_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    listed = capsys.readouterr().out.partition("options:")[2]
    flags = [word.rstrip(",") for line in listed.splitlines() for word in line.split("  ")[1:2]]
    assert flags == ["-h, --help", "-n N", "--hosts H:N,...", "--horovod", "--timeline FILE", "--log-dir DIR"]
