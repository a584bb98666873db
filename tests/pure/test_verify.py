"""`multiring verify gpu`: what is run, kept and written. The parts themselves run in tests/cuda."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from multiring._cli import main
from multiring._verify import running
from multiring._verify.parts import PARTS, VerifyPart
from multiring._verify.results import FAILED, NOT_RUN, PASSED, Check, PartResult, page_of, read, write
from multiring.errors import ArgumentError, StallError

MACHINE: dict[str, Any] = {"devices": ["a GPU"], "torch": "2.13.0", "CUDA": "13.0", "multiring": "0.2.0"}
RESULT = PartResult(part="nccl", title="the engine", machine=json.dumps(MACHINE), status=PASSED, seconds=2.0)
WORKER = """
import json, pathlib, sys
name, target, *_ = sys.argv[1:]
done = pathlib.Path({folder!r}, name)
with done.open("a") as file:
    file.write("x")
if name == "nccl":
    raise SystemExit("the driver is gone")
holds = name != "training"
checks = [dict(claim="it is | right", holds=holds, found="two\\nlines")]
pathlib.Path(target).write_text(json.dumps(dict(checks=checks, figures=dict(speed="3 GB/s"))))
"""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A worker that notes its runs in the folder that is returned."""
    for part in PARTS:
        (tmp_path / part.worker).write_text(WORKER.format(folder=str(tmp_path)), encoding="utf-8")
    monkeypatch.setattr(running, "_WORKERS", tmp_path)
    return tmp_path


def test_parts_have_names_of_their_own_and_end_within_eight_minutes() -> None:
    assert len({each.name for each in PARTS}) == len(PARTS)
    assert all(part.limit_s <= 480 for part in PARTS)
    assert {each.name for each in PARTS if each.ranks(1) is None} == {"gpus"}


def test_results_are_kept_until_the_machine_changes(worker: Path) -> None:
    def run(machine: dict[str, Any]) -> dict[str, str]:
        found = running.run_all(
            running.chosen(["versions", "training", "nccl", "gpus"]), worker / "out", {"date": "today"}, machine
        )
        return {each.part: each.status for each in found}

    expected = {"versions": PASSED, "training": FAILED, "nccl": FAILED, "gpus": NOT_RUN}
    assert run(MACHINE) == run(MACHINE) == expected
    assert (worker / "versions").read_text(encoding="utf-8") == "x"
    other = {**MACHINE, "torch": "2.14.0"}
    assert run(other) == expected
    assert (worker / "versions").read_text(encoding="utf-8") == "xx"
    page = (worker / "out" / "gpu.md").read_text(encoding="utf-8")
    assert "| it is \\| right | **NO** | two lines |" in page
    assert "it needs two GPUs; torch sees 1 GPUs" in page
    assert "exit code 1; the last lines of 1 ranks:\n" in page
    assert "the driver is gone" in page
    whole = json.loads((worker / "out" / "gpu.json").read_text(encoding="utf-8"))
    assert [each["status"] for each in whole["parts"]] == list(expected.values())


def test_a_part_without_checks_has_not_passed(worker: Path) -> None:
    (worker / PARTS[0].worker).write_text(
        "import sys; open(sys.argv[2], 'w').write('{\"checks\": [], \"figures\": {}}')"
    )
    assert running.run_part(PARTS[0], MACHINE).status == FAILED


def test_a_part_without_an_end_is_ended(worker: Path) -> None:
    (worker / PARTS[0].worker).write_text("import time; time.sleep(60)", encoding="utf-8")
    part = VerifyPart(name="slow", title="slow", ranks=lambda _: 1, limit_s=2.0)
    found = running.run_part(part, MACHINE)
    assert (found.status, found.reason.partition(";")[0]) == (FAILED, "no end within 2 s")


def test_nothing_is_awaited_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that does not end when it is told to, and a driver that does not answer."""
    monkeypatch.setattr(running, "_GRACE_S", 0.5)
    monkeypatch.setattr(running, "_ASK_S", 0.5)
    stays = ["sh", "-c", "trap '' TERM; echo on; exec sleep 600"]
    assert running._ended(stays, 4.0, {}) == (None, "on\n")
    with pytest.raises(StallError, match=r"torch has not said for 0\.5 s which GPUs there are"):
        running.machine_here(stays)


def test_results_of_others_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "nccl.json"
    path.write_text('{"part": "mine"}', encoding="utf-8")
    assert read(path) is None
    with pytest.raises(ArgumentError, match=r"nccl\.json"):
        write(path, RESULT)
    assert path.read_text(encoding="utf-8") == '{"part": "mine"}'


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = PartResult(
        part="nccl",
        title="x",
        machine="m",
        status=FAILED,
        checks=[Check(claim="a", holds=False, found="b")],
        figures={"speed": "1"},
    )
    write(tmp_path / "a.json", result)
    assert read(tmp_path / "a.json") == result
    assert page_of({"date": "today"}, [result]).startswith(
        "# What multiring does on this machine's GPUs\n\n- date: today"
    )


def test_without_a_gpu_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "multiring._cli.verify.machine_here", lambda: {**MACHINE, "devices": [], "torch": None, "CUDA": None}
    )
    assert main(["verify", "gpu", "--out", str(tmp_path / "out"), "--only", "versions,gpus"]) == 3
    assert "it needs a GPU, and torch's CUDA build; torch sees 0 GPUs" in capsys.readouterr().out
    assert main(["verify", "gpu", "--only", "speed"]) == 2
    assert "no part speed: want versions, behaviours, collectives" in capsys.readouterr().err


def test_the_machine_is_that_of_a_new_process() -> None:
    found = running.machine_here((sys.executable,))
    assert set(found) == {"devices", "torch", "CUDA", "multiring"}
