"""Settings come from the environment and are parsed strictly: an invalid value is an error, never a default."""

from dataclasses import FrozenInstanceError, fields

import pytest

from multiring._setting_values import Rail
from multiring._settings import Settings, environment_of
from multiring.errors import ArgumentError

VALUES = {
    "MULTIRING_RANK": ("3", 3, ["-1", "x", "", "1.5"]),
    "MULTIRING_SIZE": ("4", 4, ["-1", "four"]),
    "MULTIRING_LOCAL_RANK": ("1", 1, ["-1"]),
    "MULTIRING_LOCAL_SIZE": ("2", 2, ["-2"]),
    "MULTIRING_RENDEZVOUS": ("host:1234", "host:1234", []),
    "MULTIRING_SECRET": ("hush", "hush", []),
    "MULTIRING_SECRET_FILE": ("/run/secret", "/run/secret", []),
    "MULTIRING_JOB": ("job-7", "job-7", []),
    "MULTIRING_RANK_PROCESS": ("{}", "{}", []),
    "MULTIRING_LAUNCHED_IN": ("PMI_RANK=0", "PMI_RANK=0", []),
    "MULTIRING_REPORTS": ("@multiring-1", "@multiring-1", []),
    "MULTIRING_MIN_RANKS": ("2", 2, ["0", "-1", "two"]),
    "MULTIRING_INTAKE": ("2", 2, ["-1", "two"]),
    "MULTIRING_RECORD": ("1", True, ["", "run.jsonl"]),
    "MULTIRING_ENGINE": ("tcp", "tcp", ["TCP", "nccl", ""]),
    "MULTIRING_INTERFACE": ("eth0", "eth0", []),
    "MULTIRING_TOPOLOGY": ("topology.toml", "topology.toml", []),
    "MULTIRING_PLAN": ("plan.toml", "plan.toml", []),
    "MULTIRING_REPLAN": ("0", False, ["never"]),
    "MULTIRING_RAILS": (
        "rail0:1gbit, fe80::1:2.5Mbit,::1",
        (Rail("rail0", 1e9), Rail("fe80::1", 2.5e6), Rail("::1", None)),
        ["", "a,", "a,a", ":1gbit", "a:0bit", "a:1xbit", "a:1gbit,a"],
    ),
    "MULTIRING_RAIL_TIMEOUT_S": ("0.5", 0.5, ["0", "x"]),
    "MULTIRING_CONNECTIONS": ("4", 4, ["65", "-1", "many", ""]),
    "MULTIRING_WIRE_TIMEOUT_S": ("3", 3.0, ["2.9", "nan", "x"]),
    "MULTIRING_SEAL": ("1", True, ["maybe", "2"]),
    "MULTIRING_SEAL_LIBRARY": ("/lib/libcrypto.so.3", "/lib/libcrypto.so.3", []),
    "MULTIRING_PORTS": ("5000-5010", (5000, 5010), ["5010-5000", "x", "1-70000", "-5", "1-2-3"]),
    "MULTIRING_INIT_TIMEOUT_S": ("2.5", 2.5, ["0", "-1", "nan", "soon"]),
    "MULTIRING_STALL_WARN_S": ("1", 1.0, ["0"]),
    "MULTIRING_STALL_TIMEOUT_S": ("9", 9.0, ["nan"]),
    "MULTIRING_SEGMENT_BYTES": ("4096", 4096, ["-4096", "4k"]),
    "MULTIRING_DEVICE_PATH": ("staged", "staged", ["", "NCCL"]),
    "MULTIRING_LOG_MOVES": ("yes", True, ["maybe", "", "2"]),
    "MULTIRING_LOWER": ("0", False, ["off", ""]),
    "MULTIRING_DYNAMIC_PROCESS_SETS": ("1", True, ["", "DYNAMIC"]),
    "MULTIRING_TIMELINE": ("trace.json.gz", "trace.json.gz", [""]),
    "MULTIRING_TIMELINE_PREVIEW": ("1", True, ["", "maybe"]),
    "MULTIRING_TIMELINE_MARK_CYCLES": ("1", True, ["", "often"]),
    "MULTIRING_CHECK_FIRST_STEPS": ("0", False, ["", "maybe"]),
    "MULTIRING_BENCH_PEERS": ("/opt/peers", "/opt/peers", []),
    "MULTIRING_DATA_CACHE": ("/nvme/cache", "/nvme/cache", []),
    "MULTIRING_DATA_MEMORY": ("0", 0, ["-1", "1 GiB", "x"]),
    "MULTIRING_DATA_SHARE": ("1", True, ["", "maybe"]),
    "MULTIRING_READ_PEERS": ("no", False, ["never"]),
}


def test_every_setting_is_tested_here() -> None:
    assert {each.metadata["name"] for each in fields(Settings)} == set(VALUES)
    assert all(each.metadata["meaning"] for each in fields(Settings))


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_environment({})
    assert settings == Settings()
    assert (settings.rank, settings.engine, settings.init_timeout_s) == (None, "auto", 300.0)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_parsed_or_named(name: str) -> None:
    text, want, wrong = VALUES[name]
    (attribute,) = [each.name for each in fields(Settings) if each.metadata["name"] == name]
    assert getattr(Settings.from_environment({name: text}), attribute) == want
    for bad in wrong:
        with pytest.raises(ArgumentError, match=f"{name}='{bad}': want "):
            Settings.from_environment({name: bad})


def test_the_words_for_yes_and_no() -> None:
    for text in ("1", "true", "True", "yes"):
        assert Settings.from_environment({"MULTIRING_LOG_MOVES": text}).log_moves is True
    for text in ("0", "false", "no", "NO"):
        assert Settings.from_environment({"MULTIRING_LOG_MOVES": text}).log_moves is False


def test_rails_are_handed_on_as_they_were_read() -> None:
    rails = Settings.from_environment({"MULTIRING_RAILS": "eth0,10.0.0.1:1.5gbit"}).rails
    assert Settings.from_environment(environment_of(rails=rails)).rails == rails
    assert Settings().changed(rails=rails).rails == Settings().changed(rails="eth0,10.0.0.1:1500mbit").rails == rails


def test_one_port_is_a_range() -> None:
    assert Settings.from_environment({"MULTIRING_PORTS": "80"}).ports == (80, 80)


def test_a_misspelt_setting_is_named_with_what_was_meant() -> None:
    with pytest.raises(ArgumentError, match=r"unknown setting MULTIRING_ENGIN='tcp'; did you mean MULTIRING_ENGINE\?"):
        Settings.from_environment({"MULTIRING_ENGIN": "tcp"})
    with pytest.raises(ArgumentError, match=r"unknown setting MULTIRING_X='1'; known are .*MULTIRING_ENGINE"):
        Settings.from_environment({"MULTIRING_X": "1"})


def test_others_variables_are_not_read() -> None:
    assert Settings.from_environment({"RANK": "x", "PATH": "", "multiring_rank": "x"}) == Settings()


def test_this_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_RANK", "11")
    assert Settings.from_environment().rank == 11
    monkeypatch.setenv("MULTIRING_RANK", "12")
    assert Settings.from_environment().rank == 12


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().rank = 1  # type: ignore[misc]  # what must not work
