"""`multiring bench step`: its networks, and its checks of the mean gradients."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import Here, Process, run_ranks
from torch import nn

from multiring._bench.job import JobError, Jobs, WrongResultError
from multiring._bench.step import StepBench, StepManner, StepQuestion
from multiring._bench.workers import step_worker
from multiring._bench.workers.step_case import ANSWER, NETWORKS, FileRendezvous, Pace, StepCase
from multiring._bench.workers.step_check import Sums, digest, mean_fault, signed_sums, tolerance_of
from multiring._bench.workers.step_emulated import EmulatedTask
from multiring._bench.workers.step_models import NETWORKS as MODELS
from multiring._bench.workers.step_pace import measure
from multiring._bench.workers.step_task import StepTask
from multiring._bench.workers.step_worker import LIBRARIES, Training, difference, fault, time_steps
from multiring._cli import main
from multiring.errors import ArgumentError

# The first two numbers are the usual counts for the papers' networks. The embedding has 8 x 100 000 x 32 + 257 x 128
# + 129 parameters. The transformer with f features has 12 blocks of 12 f^2 + 13 f parameters. It also has two tables of
# 8192 f, one table of 128 f, and 2 f more.
PARAMETERS = {"resnet50": 25_557_032, "vgg16": 138_357_544, "embedding": 25_633_025, "transformer": 97_737_216}
ADAPTED = {"ddp-multiring", "ddp-multiring-hook", "fsdp", "fsdp-multiring", "fsdp-multiring-arena", "ddp-nccl", "alone"}
ONCE = StepManner(alternations=1, steps=1, warmup=0)
SMALL = StepQuestion(network="embedding", batch=8)
PRETENDERS = Path(__file__).parents[2] / "support" / "step_workers"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    # The ranks must be able to meet in a folder with unusual characters.
    spaced = tmp_path / "a b%20c"
    spaced.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spaced))
    with Jobs(300.0) as entered:
        yield entered


# ---- networks ----


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_their_parameters(name: str) -> None:
    with torch.device("meta"):  # uses no memory; VGG-16 would use half a gigabyte
        counted = sum(parameter.numel() for parameter in MODELS[name].make().parameters())
    assert counted == PARAMETERS[name] == NETWORKS[name].parameters


@pytest.mark.parametrize(
    ("name", "shape"),
    [("resnet50", (2, 1000)), ("vgg16", (2, 1000)), ("embedding", (2,)), ("transformer", (2, 8192, 128))],
)
def test_networks_map_samples_to_what_their_loss_takes(name: str, shape: tuple[int, ...]) -> None:
    network = MODELS[name]
    with torch.device("meta"):
        model = network.make()
        inputs, targets = network.samples(2, 64)
        outputs = model(inputs)
        assert outputs.shape == shape
        assert network.loss(outputs, targets).shape == ()


def test_libraries_and_networks_are_complete() -> None:
    assert set(LIBRARIES) == {"multiring", "ddp", "independent", *ADAPTED}
    assert set(MODELS) == set(NETWORKS)


# ---- the check of means ----


def linear(scale: float, seed: int) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(300, 40)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return model


def mixed(mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Sums:
    """Return the sums of two ranks' gradients combined by `mix`."""
    ours, theirs = linear(1.0, 1), linear(1.0, 2)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        one.grad = mix(one.grad, other.grad)
    return signed_sums(ours)


ALONE = [signed_sums(linear(1.0, seed)) for seed in (1, 2)]


def test_a_mean_passes() -> None:
    assert mean_fault(mixed(lambda one, other: (one + other) / 2), ALONE) == ""


@pytest.mark.parametrize(
    "mix",
    [
        lambda one, other: one + other,
        lambda one, _: one,
        lambda _, other: other,
        lambda one, other: (one + other.roll(1)) / 2,
        lambda one, other: 0.501 * one + 0.499 * other,
        lambda one, _: torch.full_like(one, torch.nan),
        lambda one, _: torch.zeros_like(one),
    ],
)
def test_what_is_no_mean_does_not(mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    assert mean_fault(mixed(mix), ALONE).startswith("the gradient of weight sums to ")


def test_a_missing_gradient_is_named() -> None:
    assert mean_fault({"weight": ALONE[0]["weight"]}, [ALONE[0]]) == "bias has no gradient"


@pytest.mark.parametrize(("got", "alone"), [({}, ALONE), (ALONE[0], [ALONE[0], ALONE[0]])])
def test_a_check_that_sees_nothing_is_an_error(got: Sums, alone: list[Sums]) -> None:
    with pytest.raises(AssertionError, match="want different gradients on every rank"):
        mean_fault(got, alone)


def test_a_digest_sees_one_bit() -> None:
    model = linear(1.0, 1)
    before = digest(model)
    with torch.no_grad():
        model.bias[7] = torch.nextafter(model.bias[7], torch.tensor(torch.inf))
    assert digest(model) != before


# ---- the check of a step ----


def case(out: Path) -> StepCase:
    return StepCase(
        library="multiring",
        network="embedding",
        batch=4,
        image_size=64,
        dtype="float32",
        threads=1,
        steps=1,
        warmup=0,
        out_dir=str(out),
    )


@pytest.fixture
def task(tmp_path: Path) -> StepTask:
    return StepTask(case(tmp_path), rank=0)


def alone_of(task: StepTask) -> Sums:
    task.reproducible_backward(task.model)
    sums = signed_sums(task.model)
    task.model.zero_grad()
    return sums


def training(task: StepTask, *, lr: float = 0.1) -> Training:
    """Return a training that claims to share gradients and does not."""
    return Training(task.model, torch.optim.SGD(task.model.parameters(), lr=lr), "", {})


def test_a_library_that_shares_nothing_is_found(task: StepTask, tmp_path: Path) -> None:
    alone = alone_of(task)
    other = {name: (signed + norm, norm) for name, (signed, norm) in alone.items()}
    FileRendezvous(tmp_path, 1, 2).tell("alone", other)
    assert "the mean of all ranks'" in fault(task, training(task), alone, FileRendezvous(tmp_path, 0, 2))


def test_ranks_that_differ_after_a_step_are_found(task: StepTask, tmp_path: Path) -> None:
    alone = alone_of(task)
    almost = {name: (signed + 1e-9 * norm, norm) for name, (signed, norm) in alone.items()}
    FileRendezvous(tmp_path, 1, 2).tell("alone", almost)
    FileRendezvous(tmp_path, 1, 2).tell("digest after one step", "other bits")
    wrong = fault(task, training(task), alone, FileRendezvous(tmp_path, 0, 2))
    assert wrong == "after one step the ranks' parameters differ"


def test_a_step_that_does_nothing_is_found(task: StepTask, tmp_path: Path) -> None:
    alone = alone_of(task)
    assert fault(task, training(task, lr=0.0), alone, FileRendezvous(tmp_path, 0, 1)) == "a step changed no parameter"


def test_processes_that_share_nothing_may_differ(task: StepTask, tmp_path: Path) -> None:
    FileRendezvous(tmp_path, 1, 2).tell("digest after it", "other bits")
    apart = Training(task.model, task.optimizer(), "", {}, is_shared=False)
    assert difference(task, apart, FileRendezvous(tmp_path, 0, 2), "it") == ""


# ---- emulated compute ----


@cache
def order() -> tuple[str, ...]:
    """Return the names of the embedding's gradients in the measured order."""
    return tuple(name for name, _ in measure(StepTask(case(Path()), rank=0), 1, 0).backward)


@pytest.fixture
def emulated(tmp_path: Path) -> EmulatedTask:
    """Return a task in the measured order of gradients, with made-up times."""
    pace = Pace(
        forward_s=0.25, backward=tuple((name, 2.0**-at) for at, name in enumerate(order(), 1)), optimizer_s=0.125
    )
    (tmp_path / "pace.json").write_text(json.dumps(asdict(pace)))
    return EmulatedTask(replace(case(tmp_path), pace=str(tmp_path / "pace.json")), rank=0)


def test_a_pace_has_every_gradient_in_its_order(task: StepTask) -> None:
    pace = measure(task, 3, 1)
    assert {name for name, _ in pace.backward} == {name for name, _ in task.model.named_parameters()}
    assert pace.backward[0][0].startswith("head.2")  # the last layer comes first
    assert pace.backward[-1][0].startswith("tables")
    assert min(pace.forward_s, pace.optimizer_s, *(seconds for _, seconds in pace.backward)) > 0
    assert pace.step_s == pace.forward_s + sum(seconds for _, seconds in pace.backward) + pace.optimizer_s


def test_emulated_gradients_come_at_the_pace_and_in_the_order(
    emulated: EmulatedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | str] = []
    monkeypatch.setattr("time.sleep", seen.append)
    for name, parameter in emulated.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name.removeprefix("network.")))  # type: ignore[no-untyped-call]
    emulated.backward(emulated.model)
    pace = Pace.read(Path(emulated.case.pace))
    assert seen == [0.25, *(what for name, seconds in pace.backward for what in (seconds, name))]


def test_emulated_gradients_are_other_ones_on_every_rank_and_the_same_every_time(emulated: EmulatedTask) -> None:
    other = EmulatedTask(emulated.case, rank=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda _: None)
        first, again, others = alone_of(emulated), alone_of(emulated), alone_of(other)
    assert first == again
    assert first.keys() == others.keys()
    assert all(first[name] != others[name] for name in first)
    assert digest(emulated.model) == digest(other.model)


def test_an_emulated_optimizer_steps_until_all_is_verified(
    emulated: EmulatedTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    rendezvous = FileRendezvous(tmp_path, 0, 1)
    training = Training(emulated.model, emulated.optimizer(), "", {})
    assert fault(emulated, training, alone_of(emulated), rendezvous) == ""
    before, slept[:] = digest(emulated.model), []
    assert len(time_steps(emulated.case, emulated, training, rendezvous)) == 1
    assert digest(emulated.model) == before
    assert sum(slept) == Pace.read(Path(emulated.case.pace)).step_s


def test_a_pace_of_another_network_is_refused(task: StepTask, tmp_path: Path) -> None:
    pace = tmp_path / "pace.json"
    pace.write_text(json.dumps(asdict(Pace(forward_s=1.0, backward=(("weight", 1.0),), optimizer_s=1.0))))
    with pytest.raises(AssertionError, match="the recorded times belong to another network"):
        EmulatedTask(replace(task.case, pace=str(pace)), rank=0)


@pytest.mark.parametrize(("wire", "lost"), [("fp16", 2.0**-12), ("bf16", 2.0**-9), ("int8", 4 / 254)])
def test_what_a_wire_type_loses_is_no_fault_and_a_missing_rank_is(wire: str, lost: float) -> None:
    generator = torch.Generator().manual_seed(3)

    def noisy(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        mean = (one + other) / 2
        size = mean.abs() if wire != "int8" else torch.ones_like(mean)
        return mean + lost * size * (2 * torch.rand(mean.shape, generator=generator) - 1)

    assert mean_fault(mixed(noisy), ALONE, tolerance_of(wire)) == ""
    assert mean_fault(mixed(lambda one, _: one), ALONE, tolerance_of(wire)) != ""


# ---- jobs ----


def test_emulated_compute_is_measured_verified_and_timed(jobs: Jobs) -> None:
    """The bench's own processes measure and train; the tests below run the other libraries on forked ranks."""
    manner = StepManner(alternations=1, steps=2, warmup=1)
    bench = StepBench(jobs, manner, (), leave_out=["independent"])
    made = bench.compare(replace(SMALL, is_emulated=True))
    assert made.pace is not None
    assert [timing.library for timing in made.timings] == ["multiring"]
    assert all(timing.seconds[0] > made.pace.step_s for timing in made.timings)
    assert sorted(path.name for path in jobs.folder.iterdir()) == ["output", "pace.json"]


def answers_of(library: str, folder: Path, *, pace: str = "") -> list[dict[str, Any]]:
    """Run the bench's worker on two forked ranks, and return their answers."""
    out = folder / library
    out.mkdir()
    case_file = folder / f"{library}.json"
    replace(case(out), library=library, batch=8, dtype="bfloat16", steps=2, warmup=1, pace=pace).write(case_file)
    process = Process(nursery="torch", beforehand=("multiring._bench.workers.step_worker", "torch.distributed.fsdp"))
    run_ranks(work, 2, str(case_file), process=process, deadline_s=240.0)
    return [json.loads((out / f"{ANSWER}-{rank}.json").read_text()) for rank in range(2)]


def work(_here: Here, case_file: str) -> None:
    sys.argv[1:] = [case_file]
    step_worker.main()


def test_every_library_is_verified_and_timed(tmp_path: Path) -> None:
    backends = {"multiring": None, "ddp": "gloo", "independent": None}
    backends |= dict.fromkeys(("ddp-multiring-hook", "fsdp-multiring", "fsdp-multiring-arena"), "multiring")
    for library, backend in backends.items():
        for answer in answers_of(library, tmp_path):
            assert answer["wrong"] == ""
            assert len(answer["seconds"]) == 2
            assert min(answer["seconds"]) > 0
            assert answer["settings"].get("backend") == backend
            assert answer["settings"].get("static_graph") == ("True" if library.startswith("ddp") else None)


@pytest.mark.parametrize("library", ["ddp", "independent"])
def test_other_libraries_take_as_long_as_emulated_compute(library: str, tmp_path: Path) -> None:
    pace = Pace(forward_s=0.05, backward=tuple((name, 0.01) for name in order()), optimizer_s=0.05)
    (tmp_path / "pace.json").write_text(json.dumps(asdict(pace)))
    for answer in answers_of(library, tmp_path, pace=str(tmp_path / "pace.json")):
        assert answer["wrong"] == ""
        assert min(answer["seconds"]) > pace.step_s


def test_a_sharded_model_is_not_emulated(jobs: Jobs) -> None:
    with pytest.raises(ArgumentError, match="fsdp shard parameters, but an emulated network never reads"):
        StepBench(jobs, ONCE, ["fsdp"]).compare(replace(SMALL, is_emulated=True))


def test_libraries_take_turns(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring._bench.step.WORKER", PRETENDERS / "quick.py")
    told: list[str] = []
    made = StepBench(jobs, StepManner(alternations=2), tell=told.append).compare(SMALL)
    turns = [line.rpartition(" ")[2] for line in told]
    assert turns == ["multiring", "ddp", "independent", "independent", "ddp", "multiring"]
    assert [timing.library for timing in made.timings] == turns[:3]
    assert [timing.settings for timing in made.timings] == [{"library": name} for name in turns[:3]]
    assert all(len(timing.seconds) == 2 for timing in made.timings)
    assert [path.name for path in jobs.folder.iterdir()] == ["output"]


@pytest.mark.parametrize(
    ("worker", "kind", "message"),
    [
        ("apart", WrongResultError, "multiring trains embedding wrongly, rank .: the gradient of .* the mean of all"),
        ("crash", JobError, "(?s)a step of embedding with multiring: exit code 1; .*I break"),
        ("mute", JobError, "a step of embedding with multiring: only 0 of 2 ranks wrote their results"),
    ],
)
def test_a_library_that_fails_ends_the_bench(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, worker: str, kind: type[Exception], message: str
) -> None:
    monkeypatch.setattr("multiring._bench.step.WORKER", PRETENDERS / f"{worker}.py")
    with pytest.raises(kind, match=message):
        StepBench(jobs, ONCE).compare(SMALL)


# ---- the command ----


def test_the_command_prints_a_record_for_each_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multiring._bench.step.WORKER", PRETENDERS / "quick.py")
    words = ["bench", "step", "--networks", "embedding,vgg16", "--alternations", "1", "--json", "--batch", "1"]
    assert main(words) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["network"], record["library"]) for record in records] == [
        (network, library) for network in ("embedding", "vgg16") for library in ("multiring", "ddp", "independent")
    ]
    # The second rank takes twice as long, and the slower rank's time counts.
    assert [record["median_step_s"] for record in records[:3]] == [0.04, 0.06, 0.02]
    assert (records[0]["exposed_s"], records[0]["ratio"], records[0]["ddp_ratio"]) == (0.02, 0.5, 1.5)


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("multiring._bench.step.WORKER", PRETENDERS / "quick.py")
    assert main(["bench", "step", "--networks", "embedding", "--alternations", "1", "--against", "none"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("command: multiring")
    table = [line.split()[:2] for line in lines[3:] if line.startswith("  ")]
    assert table[1:3] == [["multiring", "40.0"], ["independent", "20.0"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--networks", "alexnet"], "unknown network 'alexnet'"),
        (["--against", "gloo"], "'gloo' is not a library of this bench, want one of ddp, ddp-multiring, "),
        (
            ["--against", "multiring-bf16"],
            "multiring-bf16 differs from multiring only between hosts: give the number of hosts",
        ),
        (["--batch", "0"], "--batch 0: want a whole number, 1 to"),
        (["--ranks", "10000"], "10000 ranks of resnet50 need more than"),
        (["--link", "1gbit"], "--link needs a lab"),
    ],
)
def test_bad_input_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_torch_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["bench", "step"]) == 2
    assert "there is no torch to train with; install it with: " in capsys.readouterr().err
