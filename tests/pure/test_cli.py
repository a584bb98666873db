"""The command line: accepted arguments and error messages."""

import argparse
import re
import runpy
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from multiring import _cli as cli
from multiring._cli import main
from multiring._cli import run as run_command
from multiring._launch import JobOptions, run_local
from multiring._version import VERSION
from multiring.errors import ArgumentError, StateError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int, JobOptions]]:
    made: list[tuple[list[str], int, JobOptions]] = []

    def record(command: list[str], ranks: int, options: JobOptions) -> int:
        made.append((command, ranks, options))
        return 7

    monkeypatch.setattr(run_command, "run_local", record)
    return made


@pytest.mark.parametrize(
    ("argv", "call"),
    [
        (["-n", "2", "python", "x.py"], (["python", "x.py"], 2, JobOptions())),
        (["-n2", "--", "prog", "-n", "3", "--", "x"], (["prog", "-n", "3", "--", "x"], 2, JobOptions())),
        (
            ["--log-dir", "d", "-n", "1", "prog", "--log-dir", "e"],
            (["prog", "--log-dir", "e"], 1, JobOptions(log_dir=Path("d"))),
        ),
        (
            ["--horovod", "-n", "2", "python", "x.py", "--horovod"],
            (["python", "x.py", "--horovod"], 2, JobOptions(horovod=True)),
        ),
        (
            ["--grace", "5", "--stdin", "1", "--env", "A=b=c", "--env", "D=", "-n", "2", "true"],
            (["true"], 2, JobOptions(grace_s=5, stdin_rank=1, variables={"A": "b=c", "D": ""})),
        ),
    ],
)
def test_run_hands_the_command_on_as_it_is(
    calls: list[object], argv: list[str], call: tuple[list[str], int, JobOptions]
) -> None:
    assert main(["run", *argv]) == 7
    assert calls == [call]


def test_a_python_file_is_started_by_this_python(
    calls: list[tuple[list[str], int, JobOptions]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("", encoding="utf-8")
    Path("command.py").write_text("#!/bin/sh\n", encoding="utf-8")
    Path("command.py").chmod(0o755)
    for words in (["train.py", "--lr", "1"], ["./command.py"], ["missing.py"]):
        main(["run", "-n", "1", *words])
    assert [command for command, _, _ in calls] == [
        [sys.executable, "train.py", "--lr", "1"],
        ["./command.py"],
        ["missing.py"],
    ]


def test_options_come_from_a_file_and_the_command_line_wins(
    calls: list[tuple[list[str], int, JobOptions]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "there")
    file = tmp_path / "job.toml"
    file.write_text(
        'ranks = 3\ngrace = 7.5\nhorovod = true\nlog-dir = "logs"\ncommand = ["true", "-x"]\n[env]\nA = "1"\nB = "2"\n',
        encoding="utf-8",
    )
    main(["run", "--options", str(file)])
    main(["run", "--options", str(file), "-n", "2", "--grace", "0", "--env", "B=3", "--env", "HERE", "false"])
    whole = JobOptions(log_dir=Path("logs"), horovod=True, grace_s=7.5, variables={"A": "1", "B": "2"})
    variables = {"A": "1", "B": "3", "HERE": "there"}
    assert calls == [
        (["true", "-x"], 3, whole),
        (["false"], 2, replace(whole, grace_s=0, variables=variables)),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rank = 2", r"job.toml: unknown option 'rank', want one of ranks, hosts"),
        ("ranks = 0", r"job.toml: ranks = 0: want an integer >= 1"),
        ("ranks = true", r"ranks = True: want an integer"),
        ("grace = 'long'", r"grace = 'long': want seconds"),
        ("[env]\nA = 1", r"env = {'A': 1}: want a table of texts"),
        ("command = 'true'", r"command = 'true': want a list of words"),
        ("stdin = -1", r"stdin = -1: want a rank"),
        ("hosts = 'a'\nhostfile = 'b'", r"both list hosts; leave one out"),
        ("ranks = ", r"cannot read the options in .*job.toml: "),
        ("grace = -1.0\nranks = 1", r"a grace of -1 s: want 0 to 86400 s"),
    ],
)
def test_a_file_of_options_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    assert main(["run", "--options", str(tmp_path / "job.toml"), "true"]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_a_variable_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "1", "--env", "NOT_SET_HERE", "true"]) == 2
    told = "--env 'NOT_SET_HERE': want NAME=VALUE, or the NAME of a variable that is set here"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [["=hunter2"], ["A=1", "=hunter2=x"], ["="], [""]])
def test_a_value_without_a_name_is_refused_and_not_shown(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["run", "-n", "1", *(each for word in words for each in ("--env", word)), "true"]) == 2
    err = capsys.readouterr().err
    assert "--env: there is no name before the `=`; want NAME=VALUE" in err
    assert "hunter2" not in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-np", "2"], "-np is an option of other launchers; use instead: -n N"),
        (["--nproc-per-node=2"], "--nproc-per-node is an option of other launchers; use instead: -n N"),
        (["--num_processes", "2"], "--num_processes is an option of other launchers; use instead: -n N"),
        (["-H", "a:2"], "-H is an option of other launchers; use instead: --hosts H:N,..."),
        (["--machinefile", "f"], "--machinefile is an option of other launchers; use instead: --hostfile FILE"),
        (["--hosts", "a", "--hostfile", "f"], "not allowed with argument --hosts"),
        (["--host", "a:2"], "--host is an option of other launchers"),
        (["-n", "2", "--log", "d"], "unknown: --log; did you mean --log-dir?"),
        (["-n", "2", "-hostfil", "d"], "unknown: -hostfil; did you mean --hostfile?"),
    ],
)
def test_the_habits_of_others_are_answered(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["run", *words, "python", "x.py"])
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err


def test_no_option_can_be_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[argparse.ArgumentParser] = []
    init = argparse.ArgumentParser.__init__

    def recorded(self: argparse.ArgumentParser, *words: object, **options: object) -> None:
        init(self, *words, **options)  # type: ignore[arg-type] # as the caller gave them
        made.append(self)

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", recorded)
    with pytest.raises(SystemExit):
        main(["--version"])
    with pytest.raises((SystemExit, ArgumentError)):
        cli.COMMANDS["lab"].run(argparse.Namespace(program=["fault", "--help"]))
    assert len(made) > len(cli.COMMANDS)
    assert not [parser.prog for parser in made if parser.allow_abbrev]


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_ranks_that_makes_no_job(capsys: pytest.CaptureFixture[str], count: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["run", "-n", count, "true"])
    assert exit_.value.code == 2
    assert "argument -n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["walk"], ["run", "--nodes", "2", "true"], ["run", "-n", "2", "--nonsense", "true"]]
)
def test_usage_errors_exit_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2


def test_errors_are_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2"]) == 2
    assert (
        capsys.readouterr().err
        == "multiring: no command to run: want a program for the ranks, as in `multiring run -n 2 script.py`\n"
    )


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
    assert "works only on Linux; this is darwin" in capsys.readouterr().err


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
    flags = [line.split("  ")[1] for line in listed.splitlines() if line.startswith("  -")]
    assert flags == [
        "-h, --help",
        "-n N",
        "--hosts H:N,...",
        "--hostfile FILE",
        "--launcher NAME",
        "--nodes NODES",
        "--node-rank K",
        "--meet HOST:PORT",
        "--here",
        "--horovod",
        "--timeline FILE",
        "--env NAME=VALUE",
        "--stdin RANK",
        "--grace S",
        "--max-restarts N",
        "--min-ranks K",
        "--max-ranks N",
        "--reset-limit N",
        "--host-discovery SCRIPT",
        "--survive-launcher S",
        "--seal",
        "--log-dir DIR",
        "--record FILE",
        "--page [HOST:]PORT",
        "--page-token-file FILE",
        "--options FILE",
    ]


def test_ctrl_c_while_a_command_is_imported_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["run", "-n", "1", "true"]) == 130
    assert capsys.readouterr().err == ""


def destinations(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names of all values that a command and its own commands take."""
    found = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name for each in action.choices.values() for name in destinations(each)}
        found.add(action.dest)
    return found


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_no_command_takes_a_value_that_main_sets(name: str) -> None:
    parser = argparse.ArgumentParser()
    cli.COMMANDS[name].add_arguments(parser)
    assert "help" in destinations(parser)
    assert not destinations(parser) & {"command", "started_by"}
