"""`multiring run --horovod`: the ranks' imports and variables, which only ranks get. The tests need no framework."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from multiring._launch.horovod import PACKAGES

RUN = [sys.executable, "-m", "multiring", "run"]


def started(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # type: ignore[call-overload,no-any-return]  # options as the test gives them
        [*RUN, *arguments], capture_output=True, text=True, timeout=240, check=False, **options
    )


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_horovod_is_importable_in_the_started_ranks_only(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
        import importlib.util
        spec = importlib.util.find_spec("horovod")
        print(spec and spec.origin)
        """,
    )
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=True)
    assert alone.stdout == "None\n"
    assert started("-n", "1", sys.executable, script).stdout == "[0] None\n"
    for dashes in ([], ["--"]):
        done = started("--horovod", "-n", "1", *dashes, sys.executable, script)
        assert done.stdout == f"[0] {PACKAGES / 'horovod' / '__init__.py'}\n"


def test_it_is_found_before_a_folder_of_that_name_and_other_start_files_run_too(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('the source distribution, not built')\n")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.was_here = True\n")
    script = program(tmp_path, "import horovod, sys\nprint(horovod.__version__, sys.was_here)\n")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site)}
    assert started("--horovod", "-n", "1", sys.executable, script, env=environment).stdout == "[0] 0.28.1 True\n"


def test_ranks_are_told_of_their_places_and_an_outer_jobs_are_forgotten(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
        import json, os
        print(json.dumps({name: text for name, text in os.environ.items() if name.startswith("HOROVOD_")}))
        """,
    )
    left = {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "9", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_CYCLE_TIME": ""}
    environment = {"PATH": "/usr/bin:/bin", **left}
    done = started("-n", "1", sys.executable, script, env=environment)
    assert json.loads(done.stdout.removeprefix("[0] ")) == {"HOROVOD_CYCLE_TIME": ""}
    done = started("--horovod", "-n", "2", sys.executable, script, env=environment)
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for rank in ("0", "1"):
        assert json.loads(told[f"[{rank}]"]) == {
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": rank,
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_CONTROLLER": "multiring",
            "HOROVOD_CPU_OPERATIONS": "multiring",
            "HOROVOD_CYCLE_TIME": "",
        }


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
        import importlib
        import horovod.ray, horovod.spark  # which need Ray and Spark only when ranks start
        for name in ("mxnet",):
            try:
                importlib.import_module(f"horovod.{name}")
            except ImportError as error:
                print(error)
        """,
    )
    lines = started("--horovod", "-n", "1", sys.executable, script).stdout.splitlines()
    assert len(lines) == 1
    assert all(
        "multiring has no adapter for " in line
        and "horovod.torch, horovod.tensorflow and horovod.keras are there" in line
        for line in lines
    )


def test_a_rank_left_over_by_another_launcher_does_not_confuse_init(tmp_path: Path) -> None:
    script = program(tmp_path, "import multiring\nmultiring.init()\nprint(multiring.rank(), multiring.size())\n")
    environment = {"PATH": "/usr/bin:/bin", "HOROVOD_RANK": "3", "HOROVOD_SIZE": "8"}
    for flags in ([], ["--horovod"]):
        done = started(*flags, "-n", "2", sys.executable, script, env=environment)
        assert sorted(done.stdout.splitlines()) == ["[0] 0 2", "[1] 1 2"], done.stderr
    alone = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=240, check=True, env=environment
    )
    assert alone.stdout == "0 1\n"


@pytest.mark.parametrize("word", ["mpi_built", "gloo_built"])
def test_nothing_is_built_where_no_framework_is(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from multiring.horovod import builds  # noqa: PLC0415 -- beside what it is about

    monkeypatch.setattr(builds, "ADAPTERS", ())
    assert getattr(builds, word)() is None


def test_horovods_own_command_line_runs_its_programs(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
        import os
        import horovod
        print(horovod.__version__, os.environ["HOROVOD_RANK"], os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"])
        """,
    )
    words = ["-np", "2", "-H", "localhost:4", "--stall-check-warning-time-seconds", "9", "--output-filename", "out"]
    done = subprocess.run(
        [sys.executable, "-m", "multiring", "horovodrun", *words, sys.executable, script],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=tmp_path,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 0.28.1 0 9", "[1] 0.28.1 1 9"]
    assert (tmp_path / "out" / "rank.1" / "stdout").read_text() == "0.28.1 1 9\n"
    assert (tmp_path / "out" / "rank.0" / "stderr").read_text() == ""


@pytest.mark.parametrize("words", [["program.py"], ["-m", "program"], ["-c", "import program"]])
def test_a_program_under_another_launcher_finds_horovod(tmp_path: Path, words: list[str]) -> None:
    program(
        tmp_path,
        """
        import subprocess, sys
        import horovod
        print(horovod.__version__, sys.argv[1:])
        sys.stdout.flush()
        subprocess.run([sys.executable, "-c", "import horovod; print(horovod.__version__)"], check=True)
        """,
    )
    done = subprocess.run(
        [sys.executable, "-m", "multiring.horovod", *words, "--lr", "1"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout == "0.28.1 ['--lr', '1']\n0.28.1\n"


def test_without_a_program_its_usage_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "multiring.horovod"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python -m multiring.horovod ")
