"""Horovod's command line: every option of 0.28.1 works or gets a clear answer."""

import argparse
import sys
from pathlib import Path

import pytest

from multiring._cli import horovodrun, main
from multiring._cli import run as run_command
from multiring._launch import DiscoveryOptions, HostsLauncher, JobOptions

Call = tuple[list[str], int | None, str | None, JobOptions]
# Options of horovodrun 0.28.1, extracted by ast from horovod/runner/launch.py of its source distribution.
OPTIONS = """
    -v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
    --network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
    --fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce
    --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce
    --no-torus-allreduce --autotune --no-autotune --autotune-log-file --autotune-warmup-samples
    --autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np
    --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit
    --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
    --no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
    --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams
    --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp
    -prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts
    -hostfile --hostfile --host-discovery-script --gloo --mpi --jsrun
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    made: list[Call] = []

    def local(command: list[str], ranks: int, options: JobOptions) -> int:
        made.append((command, ranks, None, options))
        return 7

    def over_hosts(
        command: list[str], hosts: str, ranks: int | None, options: JobOptions, launcher: HostsLauncher
    ) -> int:
        made.append((command, ranks, f"{hosts} by {launcher.value}", options))
        return 7

    monkeypatch.setattr(run_command, "run_local", local)
    monkeypatch.setattr(run_command, "run_over_hosts", over_hosts)
    return made


def test_every_option_of_horovodrun_is_known() -> None:
    parser = argparse.ArgumentParser()
    horovodrun.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert known == {*OPTIONS.split(), "-h", "--help"}


@pytest.mark.parametrize(
    ("words", "ranks", "hosts"),
    [
        (["-np", "2"], 2, None),
        (["-np", "2", "-H", "localhost:4"], 2, None),
        (["-np", "4", "-H", "a:4,b:4"], 4, "a:4,b:4 by ssh"),
        (["--gloo", "-np", "3", "--hosts", "localhost:2,b:4"], 3, "localhost:2,b:4 by ssh"),
        (["--mpi", "-np", "2"], 2, "localhost:2 by mpiexec"),
    ],
)
def test_ranks_and_hosts(calls: list[Call], words: list[str], ranks: int, hosts: str | None) -> None:
    assert main(["horovodrun", *words, "python", "train.py", "-np", "9"]) == 7
    ((command, given, where, options),) = calls
    assert (command, given, where) == (["python", "train.py", "-np", "9"], ranks, hosts)
    assert options.horovod


def test_a_file_of_hosts(calls: list[Call], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n", encoding="utf-8")
    main(["horovodrun", "-np", "3", "-hostfile", str(tmp_path / "hosts"), "true"])
    assert calls[0][1:3] == (3, "a:2,b:2 by ssh")


def test_what_is_there_does_the_same(calls: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    words = "-np 12 --timeline-mark-cycles --stall-check-warning-time-seconds 30"
    words += " --stall-check-shutdown-time-seconds 90 --stall-check --gloo-timeout-seconds 40 --start-timeout 50"
    words += " --network-interface eth0 --output-filename out -p 2222 -i key --verbose --disable-cache"
    main(["horovodrun", *words.split(), "--mpi-args", "-x 'a b'", "true"])
    options = calls[0][3]
    assert options.log_dir == Path("out")
    assert options.logs(3, 12) == ("rank.03/stdout", "rank.03/stderr")
    assert options.logs(3, 10) == ("rank.3/stdout", "rank.3/stderr")
    assert options.mpiexec_words == ("-x", "a b")
    assert options.ssh_words == ("-p", "2222", "-i", "key")
    assert options.variables == {
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "40",
        "MULTIRING_INIT_TIMEOUT_S": "50",
        "MULTIRING_INTERFACE": "eth0",
        "HYDRA_LAUNCHER_EXTRA_ARGS": "-p 2222 -i key",
        "PRTE_MCA_plm_ssh_args": "-p 2222 -i key",
        "OMPI_MCA_plm_rsh_args": "-p 2222 -i key",
    }
    assert capsys.readouterr().err == ""


def test_several_interfaces_are_rails(calls: list[Call]) -> None:
    main(["horovodrun", "-np", "2", "--network-interfaces", "eth0,eth1", "true"])
    assert calls[0][3].variables == {"MULTIRING_RAILS": "eth0,eth1"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--fusion-threshold-mb 32", "HOROVOD_FUSION_THRESHOLD has no effect: gradients are reduced in place"),
        ("--cycle-time-ms 3.5", "HOROVOD_CYCLE_TIME has no effect: operations start when they are submitted"),
        ("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE has no effect: the planner chooses"),
        ("--autotune --autotune-log-file a.csv", "HOROVOD_AUTOTUNE_LOG has no effect: the planner chooses"),
        ("--num-nccl-streams 2", "HOROVOD_NUM_NCCL_STREAMS has no effect: multiring moves host memory"),
        ("--log-level DEBUG --log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME has no effect: messages go to"),
        ("--tcp", "--tcp has no effect: bytes go over sockets"),
        ("--binding-args x", "--binding-args has no effect: the launcher gives each rank its cores"),
        ("-prefix-timestamp", "--prefix-output-with-timestamp has no effect: lines are tagged"),
    ],
)
def test_what_has_no_effect_is_said(
    calls: list[Call], capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    assert main(["horovodrun", "-np", "2", *words.split(), "true"]) == 7
    assert told in capsys.readouterr().err
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--min-np 3", "--min-np 3, -np 2: want 1 to 2"),
        ("--min-np 0", "--min-np 0: want a whole number, 1 to"),
        ("--max-num-proc 1", "--max-np 1, -np 2: want at least 2"),
        ("--slots-per-host 2", "--slots-per-host: want --min-np K or --host-discovery-script, too"),
        ("--reset-limit 2", "--reset-limit: want --min-np K"),
        ("--blacklist-cooldown-range 1 2", "--blacklist-cooldown-range: want --min-np K"),
        ("--elastic-timeout 9", "--elastic-timeout: want --min-np K"),
        ("--min-np 1 --elastic-timeout 9", "--elastic-timeout: want --host-discovery-script, too"),
        ("--min-np 1 --blacklist-cooldown-range 2 1", "--blacklist-cooldown-range 2 1: want two times in seconds"),
        ("--host-discovery-script d.sh --slots-per-host 0", "--slots-per-host 0: want a whole number, 1 to"),
        ("--host-discovery-script d.sh -H a:2", "--host-discovery-script names the hosts; leave out -H and -hostfile"),
        ("--jsrun", "let jsrun start `python -m multiring.horovod script.py` itself"),
        ("-H a:1", "2 ranks, but a:1 has places for 1; want fewer ranks, or more hosts"),
    ],
)
def test_what_there_is_no_way_to_do_is_refused(
    calls: list[Call], capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    assert main(["horovodrun", "-np", "2", *words.split(), "true"]) == 2
    assert told in capsys.readouterr().err
    assert not calls


def test_ranks_have_to_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["horovodrun", "true"])
    assert "how many ranks? say -np N" in capsys.readouterr().err


def test_ranks_come_and_go(calls: list[Call]) -> None:
    main(["horovodrun", "-np", "2", "--min-np", "1", "-H", "a:2,b:2", "--reset-limit", "3", "true"])
    main(["horovodrun", "-np", "2", "--max-np", "3", "-H", "a:2,b:2", "--blacklist-cooldown-range", "1", "9", "true"])
    main(["horovodrun", "-np", "2", "--min-np", "1", "-H", "localhost:3", "true"])
    main(["horovodrun", "-np", "2", "--min-np", "2", "-H", "a:2,b:2", "true"])
    found = [(ranks, hosts, options.min_ranks, options.max_ranks) for _, ranks, hosts, options in calls]
    assert found == [
        (4, "a:2,b:2 by ssh", 1, 4),
        (3, "a:2,b:2 by ssh", 2, 3),
        (3, None, 1, 3),
        (4, "a:2,b:2 by ssh", 2, 4),
    ]
    assert calls[0][3].reset_limit == 3
    assert calls[1][3].cooldown_s == (1.0, 9.0)


def test_a_script_names_the_hosts(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["horovodrun", "-np", "2", "--host-discovery-script", "d.sh"]
    main([*words, "true"])
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "30")
    main([*words, "--slots-per-host", "4", "--min-np", "1", "--max-np", "8", "true"])
    main([*words, "--elastic-timeout", "7", "true"])
    found = [(ranks, hosts, options.min_ranks, options.max_ranks) for _, ranks, hosts, options in calls]
    assert found == [(None, "None by ssh", 2, 4096), (None, "None by ssh", 1, 8), (None, "None by ssh", 2, 4096)]
    assert [options.discovery for *_, options in calls] == [
        DiscoveryOptions(script="d.sh", slots=1, timeout_s=600.0, places=2),
        DiscoveryOptions(script="d.sh", slots=4, timeout_s=30.0, places=2),
        DiscoveryOptions(script="d.sh", slots=1, timeout_s=7.0, places=2),
    ]
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "soon")
    assert main([*words, "true"]) == 2


def test_bounds_that_say_what_is_so_do_no_harm(calls: list[Call]) -> None:
    assert main(["horovodrun", "-np", "2", "--min-np", "2", "--max-np", "2", "true"]) == 7
    assert calls


# ---- its configuration file ----

CONFIGURATION = """
controller: mpi
params:
    fusion_threshold_mb: 32
    cycle_time_ms: 1
timeline:
    filename: t.json
    mark_cycles: true
stall_check:
    enabled: false
    warning_time_seconds: 7
library_options:
    gloo_timeout_seconds: 40
logging:
    level: INFO
"""


def test_a_configuration_says_what_options_say_and_these_win(calls: list[Call], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIGURATION, encoding="utf-8")
    main(["horovodrun", "-np", "2", "--config-file", str(tmp_path / "c.yaml"), "--stall-check", "true"])
    _, _, hosts, options = calls[0]
    assert hosts == "localhost:2 by mpiexec"
    assert options.timeline == Path("t.json").absolute()
    assert options.variables == {
        "HOROVOD_FUSION_THRESHOLD": str(32 * 2**20),
        "HOROVOD_CYCLE_TIME": "1.0",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "40",
        "HOROVOD_LOG_LEVEL": "INFO",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("parms:\n  a: 1", "unknown section 'parms', want one of controller, params"),
        ("params:\n  cycle: 1", "params: cycle: there is no such option"),
        ("params:\n  cycle_time_ms: fast", "params: cycle_time_ms: 'fast', want a number"),
        ("autotune:\n  enabled: 1", "autotune: enabled: 1, want true or false"),
        ("timeline:\n  filename: 3", "timeline: filename: 3, want text"),
        ("controller: jsrun", "controller: 'jsrun', want gloo or mpi"),
        ("- 1", "want sections of options"),
        ("params: [", "cannot read the options in"),
    ],
)
def test_a_configuration_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    assert main(["horovodrun", "-np", "2", "--config-file", str(tmp_path / "c.yaml"), "true"]) == 2
    assert told in capsys.readouterr().err


def test_without_pyyaml_it_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["horovodrun", "-np", "2", "--config-file", "c.yaml", "true"]) == 2
    assert "c.yaml: reading YAML needs PyYAML: pip install pyyaml" in capsys.readouterr().err


def test_what_was_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovodrun", "--check-build"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Horovod v0.28.1, by multiring ")
    assert "    [X] PyTorch" in lines
    assert "    [ ] MXNet" in lines
    assert "    [X] multiring, which needs neither" in lines


def test_its_version_is_the_interfaces(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["horovodrun", "--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == "0.28.1\n"


def test_a_python_file_needs_no_python(calls: list[Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("", encoding="utf-8")
    main(["horovodrun", "-np", "2", "train.py"])
    assert calls[0][0] == [sys.executable, "train.py"]
