"""Ranks on several hosts: the arguments and variables that mpiexec gets, and those it does not get."""

import os
import stat
import sys
from pathlib import Path

import pytest

from multiring._cli import main
from multiring._launch.mpiexec import Mpiexec, first_places, mpiexec_of, parse_hostfile, parse_hosts
from multiring._launch.over_mpiexec import command_line, rendezvous_of
from multiring._settings import Settings
from multiring.errors import ArgumentError, UnsupportedError

PLACES = (("a", 4), ("b", 2))


def test_hosts_and_ranks() -> None:
    assert parse_hosts("a:4, b:2") == PLACES
    assert parse_hosts("me@node-1.cluster") == (("me@node-1.cluster", 1),)


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:-1", "a:x", ":4", "a:4,,b:4", "-x:2", "a b:2", "a:1:2", "a:²"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not HOST:RANKS; want names and numbers, like a:4,b:4"):
        parse_hosts(text)


def test_a_host_twice() -> None:
    with pytest.raises(ArgumentError, match="'a' is listed twice"):
        parse_hosts("a:4,b:4,a:4")


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("HYDRA build details:\n    Version: 5.0.2\n", Mpiexec.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11\n", Mpiexec.HYDRA),
        ("mpiexec (Open MPI) 5.0.11\n", Mpiexec.OPEN_MPI),
        ("mpiexec (OpenRTE) 4.1.4\n", Mpiexec.OPEN_MPI),
    ],
)
def test_whose_mpiexec(version: str, kind: Mpiexec) -> None:
    assert mpiexec_of(version) is kind


def test_hydras_command_line() -> None:
    line = command_line(Mpiexec.HYDRA, PLACES, ["prog", "-n"], ["MULTIRING_SECRET"], "/here")
    assert line[:5] == ["mpiexec", "-hosts", "a:4,b:2", "-n", "6"]
    assert line[-4:] == ["-wdir", "/here", "prog", "-n"]
    assert "-genvall" in line


def test_open_mpis_command_line() -> None:
    line = command_line(Mpiexec.OPEN_MPI, PLACES, ["prog"], ["MULTIRING_JOB", "PATH"], "/here")
    assert line[:5] == ["mpiexec", "--host", "a:4,b:2", "-n", "6"]
    assert line[-7:] == ["--wdir", "/here", "-x", "MULTIRING_JOB", "-x", "PATH", "prog"]


def test_ranks_meet_at_the_first_host_with_a_fresh_secret() -> None:
    first, second = (rendezvous_of(Settings(), "me@a") for _ in range(2))
    for told in (first, second):
        host, _, port = told["MULTIRING_RENDEZVOUS"].rpartition(":")
        assert host == "a"
        assert 20000 <= int(port) <= 29999
        assert len(told["MULTIRING_SECRET"]) == 64
    assert first["MULTIRING_SECRET"] != second["MULTIRING_SECRET"]
    assert first["MULTIRING_JOB"] != second["MULTIRING_JOB"]


def test_what_the_user_says_stands() -> None:
    settings = Settings(rendezvous="c:5000", secret_file="/there", job="mine")  # noqa: S106 -- a file's name
    assert rendezvous_of(settings, "a") == {"MULTIRING_JOB": "mine"}
    told = rendezvous_of(Settings(secret="s", ports=(7000, 7003)), "a")  # noqa: S106 -- of no job
    assert "MULTIRING_SECRET" not in told
    assert told["MULTIRING_RENDEZVOUS"] in {f"a:{port}" for port in range(7000, 7004)}


def be_mpiexec(folder: Path, script: str) -> None:
    """Create a program called mpiexec in the folder."""
    program = folder / "mpiexec"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_a_file_of_hosts_is_read_as_others_write_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\na slots=4\n\nb:2  # two\nc\nd max_slots=3\n", encoding="utf-8")
    assert parse_hostfile(file) == "a:4,b:2,c,d:3"
    for text, told in (
        ("a 4", "line 1: 'a 4' is not a host; want a line like: a slots=4"),
        ("#", "names no host; want lines"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ArgumentError, match=told):
            parse_hostfile(file)
    with pytest.raises(ArgumentError, match=r"cannot read the hosts in .*none"):
        parse_hostfile(tmp_path / "none")


def test_fewer_ranks_fill_the_first_places() -> None:
    assert first_places(PLACES, None) == PLACES
    assert first_places(PLACES, 5) == (("a", 4), ("b", 1))
    assert first_places(PLACES, 4) == (("a", 4),)


def test_no_mpiexec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["run", "--launcher", "mpiexec", "--hosts", "a:2", "--", "prog"]) == 127
    assert "pip install mpich" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "5", "--hosts", "a:2,b:2", "--", "prog"], "5 ranks, but a:2,b:2 has places for 4; want fewer"),
        (
            ["--stdin", "1", "--launcher", "mpiexec", "--hosts", "a:2,b:2", "--", "prog"],
            "--stdin 1 with --launcher mpiexec: only rank 0 can read standard input",
        ),
        (["--stdin", "4", "--hosts", "a:2,b:2", "--", "prog"], "want a rank from 0 to 3"),
        (["--hosts", "a:2,b:", "--", "prog"], "'b:' is not HOST:RANKS"),
        (["--hosts", "a:2"], "no command to run"),
    ],
)
def test_wrong_words_are_one_line_and_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_no_ssh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["run", "--hosts", "a:2", "--", "prog"]) == 127
    assert "there is none on PATH: install it (Debian: openssh-client)" in capsys.readouterr().err


def test_an_unknown_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_mpiexec(tmp_path, "echo LAM 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["run", "--launcher", "mpiexec", "--hosts", "a:2", "--", sys.executable]) == 2
    with pytest.raises(UnsupportedError, match="--version says 'LAM 7'"):
        mpiexec_of("LAM 7\n")


def test_mpiexec_gets_the_secret_in_its_environment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    be_mpiexec(tmp_path, '[ "$1" = --version ] && exec echo HYDRA; echo "$@"; env | grep ^MULTIRING_; exit 7')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MULTIRING_RANK", "0")  # left over from an outer job
    monkeypatch.setenv("MULTIRING_SIZE", "1")
    monkeypatch.setenv("MULTIRING_STALL_WARN_S", "9")
    assert main(["run", "--launcher", "mpiexec", "--hosts", "a:2", "--", "prog", "x y"]) == 7
    line, *variables = capfd.readouterr().out.splitlines()
    told = dict(word.split("=", 1) for word in variables)
    assert line.endswith(f"-wdir {Path.cwd()} prog x y")
    assert told["MULTIRING_SECRET"] not in line
    assert told["MULTIRING_STALL_WARN_S"] == "9"
    assert "MULTIRING_RANK" not in told
    assert "MULTIRING_SIZE" not in told
