"""NCCL inside each host, and the host's collectives between hosts: values, choices, and errors on all ranks."""

import os
import signal
import time
from collections import Counter
from typing import Any, cast

import pytest
import torch
from tests.cuda.test_nccl_buckets import STEPS, WARM, break_nccl, optimizer_of
from tests.cuda.test_nccl_collectives import DECISION_S, FLOATS, INTEGERS, OPS, own_values, reductions_by_nccl
from tests.standin.torch_devices import host_waits
from tests.support.cuda_torch_ranks import report_of_cuda, run_cuda
from tests.support.device_training import HOST, Program, join, mean_loss, model_of, own_batch
from tests.support.mutants import Patch
from tests.support.ranks import Here

import multiring.torch as mt
from multiring._runtime.job.job import current
from multiring.errors import CollectiveError, MultiringError
from multiring.torch import hierarchical_path, path_agreement
from multiring.torch.collectives import by_nccl
from multiring.torch.device_staging import _known
from multiring.torch.path_agreement import PathChoice, RankFacts, choice_by

# `make test-cuda` has a part; benchmarks/evidence/torch/on_devices.py has all.
HAS_ALL = "MULTIRING_TEST_ALL_SHAPES" in os.environ
HOSTS = [(2, 2), (3, 1), (2, 2, 2), (1, 2)][: 4 if HAS_ALL else 3]
SOON_S = 20  # far below the time-out of a stall, with a loaded machine
REFUSED = "rank 1: ncclCommInitRankConfig: unhandled system error (2)"


def enter(here: Here, path: str = "hierarchical", **settings: Any) -> torch.device:
    """Join the job, and wait until the ranks reduce by `path`; small tensors do, too."""
    by_nccl.LEAST_BYTES = 0
    device = join(here, **settings)
    end_s = time.monotonic() + DECISION_S
    while True:
        assert mt.allreduce(torch.ones(2, device=device), op="sum").tolist() == [here.size] * 2
        ready = mt.allgather_object(mt.device_path())
        if set(ready) == {path}:
            return device
        assert time.monotonic() < end_s, ready


# ---- gradient buckets ----


def registrations() -> int:
    return sum(each.registrations for each in _known.memory.values())


def training(here: Here, dtype: str, options: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Train; return the host's waits, the new registrations and the new memory of the device in each step."""
    device = join(here)
    program = Program(bucket_bytes=600, **options)
    expected = program.losses(here, HOST, STEPS)
    assert program.losses(here, device, STEPS) == pytest.approx(expected, rel=1e-6)
    assert mt.device_path() == "hierarchical"
    model, kind = model_of("perceptron", device).to(getattr(torch, dtype)), getattr(torch, dtype)
    optimizer, found = optimizer_of(model, **options), []
    for step in range(STEPS):
        inputs, targets = (each.to(kind) for each in own_batch(here, step, "perceptron", device))
        torch.cuda.synchronize()
        before = host_waits(), registrations(), torch.cuda.memory_reserved()
        optimizer.zero_grad()
        mean_loss(model, (inputs, targets)).backward()
        optimizer.step()
        after = host_waits(), registrations(), torch.cuda.memory_reserved()
        found.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
    sums = [float(each.detach().double().sum()) for each in model.parameters()]
    assert mt.allgather_object(sums) == [sums] * here.size
    return found[WARM:]


@pytest.mark.parametrize("hosts", HOSTS)
def test_training(hosts: tuple[int, ...]) -> None:
    assert run_cuda(training, "float32", {}, hosts=hosts) == [[(0, 0, 0)] * (STEPS - WARM)] * sum(hosts)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("bfloat16", {"op": mt.Sum}),
    ("float64", {"gradient_predivide_factor": 2.0}),
    *([("bfloat16", {}), ("float32", {"op": mt.Sum})] if HAS_ALL else []),
]


@pytest.mark.parametrize(("dtype", "options"), KINDS)
def test_types_and_operations(dtype: str, options: dict[str, Any]) -> None:
    assert run_cuda(training, dtype, options, hosts=(2, 2)) == [[(0, 0, 0)] * (STEPS - WARM)] * 4


def helped(here: Here, settings: dict[str, Any], path: str) -> list[float]:
    """Return the losses on devices and on the host."""
    device = join(here)
    program = Program(bucket_bytes=600, **settings)
    found = program.losses(here, device, STEPS), program.losses(here, HOST, STEPS)
    assert mt.device_path() == path
    return [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("helpers", ["lag", "clip, noise", "torch clip, scaler"])
def test_helpers(helpers: str) -> None:
    # Autocast rounds otherwise on the device than on the host.
    limit = 0.02 if "scaler" in helpers else 1e-5
    for differences in run_cuda(helped, {"helpers": helpers}, "hierarchical", hosts=(2, 2)):
        assert max(differences) < limit


def distance(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def rounded(here: Here, compression: str) -> tuple[str, float, float, float]:
    """Return the path, and distances of losses: devices from host, devices from host without rounding, these two."""
    device = join(here)
    program = Program(bucket_bytes=600, compression=compression)
    found, path = program.losses(here, device, STEPS), mt.device_path()
    wanted, exact = program.losses(here, HOST, STEPS), Program(bucket_bytes=600).losses(here, HOST, STEPS)
    return path, distance(found, wanted), distance(found, exact), distance(wanted, exact)


@pytest.mark.parametrize("compression", ["bf16", "fp16", "int8"])
def test_gradients_are_rounded_between_hosts(compression: str) -> None:
    for path, both, own, host in run_cuda(rounded, compression, hosts=(2, 2)):
        assert path == "hierarchical"
        assert 1e-5 < own < 2 * host
        # The sum of two ranks has one order, so that NCCL's is the host's, and so is the rounded one. A block of int8
        # begins where a rank's share does, so that its scale is another one.
        assert both < 1e-5 or compression == "int8"


def overflowing(here: Here) -> list[bool]:
    """Return whether the averages of a bucket with gaps are finite, in a step with an infinity and in the next one."""
    device = join(here)
    model = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(3, 5)).to(device)
    optimizer, finite = optimizer_of(model, compression="int8"), []
    for factor in (1.0, float("inf") if here.rank == 1 else 1.0, 1.0):
        optimizer.zero_grad()
        (model(torch.ones(2, 7, device=device)).square().sum() * factor).backward()
        optimizer.synchronize()
        finite.append(all(bool(cast("torch.Tensor", each.grad).isfinite().all()) for each in model.parameters()))
    assert mt.device_path() == "hierarchical"
    return finite


def test_an_overflow_ends_with_its_step() -> None:
    assert run_cuda(overflowing, hosts=(2, 2)) == [[True, False, True]] * 4


def by_nccl_alone(here: Here) -> str:
    device = join(here, device_path="nccl")
    Program(bucket_bytes=600, compression="bf16").losses(here, device, 2)
    return mt.device_path()


def test_nccl_between_hosts_does_not_round() -> None:
    assert set(run_cuda(by_nccl_alone, hosts=(2, 2))) == {"staged: NCCL has no wire types between hosts"}


# ---- collectives ----


def values(here: Here) -> tuple[int, Counter[str]]:
    """Return how often the host waited for the device, and NCCL's operations."""
    device, waits = enter(here), 0
    with Patch.context() as patch:
        done = reductions_by_nccl(patch)
        for salt, dtype in enumerate((*FLOATS, *INTEGERS)):
            every = torch.stack([own_values(rank, dtype, salt) for rank in range(here.size)]).double()
            own = own_values(here.rank, dtype, salt).to(device)
            for op in OPS if dtype.is_floating_point else [op for op in OPS if op != "average"]:
                wanted = OPS[op](every, dim=0).to(dtype)
                torch.cuda.synchronize()
                before = host_waits()
                copy = own.clone()
                mt.allreduce_(copy, op=op, name=f"{op} {dtype}")
                found = [mt.allreduce(own, op=op), copy, mt.allreduce(own.t(), op=op).t()]
                found += mt.grouped_allreduce([own, own], op=op)
                waits += host_waits() - before
                for each in found:
                    # The average of hosts that have unequal numbers of ranks is rounded once more.
                    assert torch.allclose(each.cpu().double(), wanted.double(), rtol=2 * epsilon_of(dtype)), (op, dtype)
        bits = torch.tensor([True, here.rank == 0, False], device=device)
        assert mt.allreduce(bits, op="sum").tolist() == [True, True, False]
        assert mt.allreduce(bits, op="product").tolist() == [True, False, False]
        large = torch.arange(300_001, device=device) * (here.rank + 1.0)
        factor = sum(range(1, here.size + 1))
        assert mt.allreduce(large, op="sum").equal(torch.arange(300_001, device=device) * float(factor))
        torch.cuda.synchronize()
        return waits, done


def epsilon_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


@pytest.mark.parametrize("hosts", HOSTS)
def test_values(hosts: tuple[int, ...]) -> None:
    for waits, done in run_cuda(values, hosts=hosts):
        assert waits == 0
        assert done["reduce_scatter"] == done["all_gather"] == 4 * (5 * len(FLOATS) + 4 * len(INTEGERS)) + 3


def named(here: Here) -> None:
    """Operations start in different orders on the ranks; some are dropped, and ranks join early."""
    device = enter(here)
    for is_mixed in (False, True):
        handles = {
            number: mt.allreduce_async_(
                torch.full((6, number + 1), 1.0 + number, device=device), op="sum", name=str(number)
            )
            for number in list(range(12))[:: -1 if is_mixed and here.rank % 2 else 1]
        }
        for number in sorted(handles):
            assert mt.synchronize(handles[number]).unique().tolist() == [(1.0 + number) * here.size]
    handle = mt.allreduce_async(torch.ones(3, device=device))
    while not mt.poll(handle):
        time.sleep(0.001)
    assert mt.synchronize(handle).tolist() == [1.0] * 3
    mt.allreduce_async(torch.ones(3, device=device), name="dropped")
    mt.allreduce_async_(torch.ones(3, device=device))
    if here.rank:
        assert mt.allreduce(torch.ones(3, device=device), op="sum").tolist() == [here.size - 1.0] * 3
    assert mt.join() >= 0
    assert mt.allreduce(torch.ones(3, device=device), op="sum").tolist() == [here.size] * 3


def test_names_in_any_order() -> None:
    run_cuda(named, hosts=(2, 2))


def sets(here: Here) -> list[str]:
    """Overlapping sets, whose hosts have unequal numbers of ranks, and an optimizer's buckets go on at a time."""
    chosen = [mt.ProcessSet([0, 1, 2]), mt.ProcessSet([1, 2, 3]), mt.ProcessSet([2, 3]), mt.ProcessSet([0, 3])]
    by_nccl.LEAST_BYTES = 0
    here.take_host()
    mt.init(process_sets=chosen)
    device = torch.device("cuda", torch.cuda.current_device())
    layer = torch.nn.Linear(3, 3).to(device)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters())
    own = [each for each in chosen if here.rank in (each.ranks or [])]
    for step in range(12):
        optimizer.zero_grad()
        layer(torch.ones(2, 3, device=device)).sum().backward()
        handles = [
            (each, mt.allreduce_async(torch.full((5,), 1.0 + step, device=device), op="sum", process_set=each))
            for each in own[:: 1 if here.rank < 2 else -1]
        ]
        for each, handle in handles:
            assert mt.synchronize(handle).tolist() == [len(each.ranks or []) * (1.0 + step)] * 5, (step, each.ranks)
        optimizer.step()
        time.sleep(0.02)
    return [mt.device_path(each) if each in own else "" for each in chosen] + [mt.device_path()]


def test_overlapping_sets() -> None:
    ways = ["hierarchical", "hierarchical", "nccl", "staged: each of the 2 hosts has one rank", "hierarchical"]
    for found in run_cuda(sets, hosts=(2, 2)):
        assert [way or wanted for way, wanted in zip(found, ways, strict=True)][:3] == ways[:3]
        assert found[3] in ("", "undecided")
        assert found[4] == "hierarchical"


# ---- which path the ranks take ----


def test_choices() -> None:
    told = [RankFacts("auto", gpu=f"0000:0{rank % 2}:00", version=22809) for rank in range(4)]
    hosts, ranks = [(0, 1), (2, 3)], (4, 5, 6, 7)
    assert choice_by(told, hosts, ranks) == PathChoice("hierarchical")
    other = [*told[:2], *(RankFacts("auto", gpu=each.gpu, version=21800) for each in told[2:])]
    assert choice_by(other, hosts, ranks) == PathChoice("hierarchical")  # each host has one version
    mixed = choice_by([told[0], other[3], *told[2:]], hosts, ranks)
    assert mixed == PathChoice("staged", "the versions of NCCL differ: rank 4: NCCL 2.28.9; rank 5: NCCL 2.18.0")
    wished = [RankFacts("nccl", gpu=each.gpu, version=each.version) for each in other]
    assert choice_by(wished, hosts, ranks).reason.startswith("the versions of NCCL differ: ranks 4, 5: ")
    shared = [*told[:3], told[2]]
    text = "ranks 6 and 7 share the GPU 0000:00:00 of their host, and NCCL needs a GPU for each rank"
    assert choice_by(shared, hosts, ranks) == PathChoice("staged", text)
    one_host = [RankFacts("hierarchical", gpu=each.gpu, version=22809) for each in told[:2]]
    assert choice_by(one_host, [(0, 1)], (4, 5)) == PathChoice("nccl")
    alone = choice_by(one_host, [(0,), (1,)], (4, 5))
    assert alone == PathChoice("staged", "each of the 2 hosts has one rank")


def decision(here: Here, wish: str, broken: str) -> str:
    by_nccl.LEAST_BYTES = 0
    device = join(here, device_path=wish)
    with Patch.context() as patch:
        break_nccl(patch, broken if here.rank == 1 else "")
        try:
            for _ in range(3):
                assert mt.allreduce(torch.ones(2, device=device), op="sum").tolist() == [here.size] * 2
                losses = Program(bucket_bytes=600).losses(here, device, 2)
                assert all(loss > 0 for loss in losses[:2])
                time.sleep(0.2)
        except MultiringError as error:
            return f"{type(error).__name__}: {error}"
    return mt.device_path()


def decided(wish: str, hosts: tuple[int, ...] = (2, 2), broken: str = "", **standin: Any) -> str:
    (found,) = set(run_cuda(decision, wish, broken, hosts=hosts, standin=standin))
    return str(found)


def test_wishes() -> None:
    assert decided("auto", hosts=(1, 1)) == "staged: each of the 2 hosts has one rank"
    assert decided("nccl", hosts=(1, 1)) == "nccl"
    assert decided("nccl") == "nccl"
    assert decided("hierarchical") == "hierarchical"
    assert decided("hierarchical", hosts=(2,)) == "nccl"
    assert decided("staged") == "staged: MULTIRING_DEVICE_PATH=staged"
    found = decided("hierarchical", hosts=(1, 1))
    assert "MULTIRING_DEVICE_PATH=hierarchical, but ranks [0, 1] cannot use NCCL: each of the 2 hosts has" in found


@pytest.mark.parametrize("broken", ["library", "communicator"])
def test_nccl_that_fails_on_one_host(broken: str) -> None:
    """The ranks of the other host stage, too."""
    reason = {
        "library": "rank 1: no NCCL 2.18.0 or later: libnccl.so.2 is NCCL 2.17.0",
        "communicator": f"NCCL cannot be started: {REFUSED}",
    }[broken]
    assert decided("auto", broken=broken) == f"staged: {reason}"
    wished = decided("hierarchical", broken=broken)
    assert f"MULTIRING_DEVICE_PATH=hierarchical, but ranks [0, 1, 2, 3] cannot use NCCL: {reason}" in wished


# ---- failures ----


def die(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in(phase: str, patch: Patch) -> None:
    """Let this rank die when it comes to `phase` of its next reduction."""
    steps: dict[str, tuple[Any, str]] = {
        "before NCCL reduces": (hierarchical_path.HierarchicalReduction, "_begun"),
        "before the copy": (hierarchical_path._ToHosts, "bring"),
        "before the network": (hierarchical_path._ToHosts, "_copy"),
        "before the copy back": (hierarchical_path._FromHosts, "fetch"),
        "before NCCL gathers": (hierarchical_path._FromHosts, "_await"),
    }
    owner, name = steps[phase]
    original = getattr(owner, name)

    def killed(*arguments: Any) -> Any:
        if phase in ("before the network", "before NCCL gathers"):
            original(*arguments)
        die()

    patch.setattr(owner, name, killed)


PHASES = ("before NCCL reduces", "before the copy", "before the network", "before the copy back", "before NCCL gathers")


def dying(here: Here, phase: str, victim: int, use: str) -> bool:
    device = enter(here)
    model: Any = model_of("perceptron", device)
    optimizer = optimizer_of(model)
    for step in range(WARM):
        optimizer.zero_grad()
        mean_loss(model, own_batch(here, step, "perceptron", device)).backward()
        optimizer.step()
    mt.barrier()
    if here.rank == victim:
        kill_in(phase, Patch())
    began_s = time.monotonic()
    with pytest.raises(CollectiveError, match=f"rank {victim}"):  # noqa: PT012 -- in which call is not known
        for step in range(3):
            if use == "buckets":
                optimizer.zero_grad()
                mean_loss(model, own_batch(here, step, "perceptron", device)).backward()
                optimizer.step()
            else:
                mt.allreduce(torch.ones(1000, device=device))
            torch.cuda.synchronize()
            time.sleep(0.2)
    assert time.monotonic() - began_s < SOON_S
    return float(torch.ones(3, device=device).sum()) == 3


USES = ("buckets", "collectives")
DEATHS = [(phase, use) for place, phase in enumerate(PHASES) for use in (USES if HAS_ALL else [USES[place % 2]])]


@pytest.mark.parametrize(("phase", "use"), DEATHS)
def test_a_rank_dies(phase: str, use: str) -> None:
    """The ranks of the other host, and the rank beside it, get an error that names it."""
    report = report_of_cuda(dying, phase, 3, use, hosts=(2, 2))
    for outcome in report.outcomes[:3]:
        assert outcome.value is True, outcome
    assert report.outcomes[3].exit_code == -signal.SIGKILL


@pytest.mark.parametrize("phase", ["before the copy", "before NCCL gathers"])
def test_a_rank_without_a_share_dies(phase: str) -> None:
    report = report_of_cuda(dying, phase, 2, "buckets", hosts=(3, 1))
    for rank in (0, 1, 3):
        assert report.outcomes[rank].value is True, report.outcomes[rank]
    assert report.outcomes[2].exit_code == -signal.SIGKILL


def failing(here: Here, step: str) -> list[str]:
    """A step fails on rank 3, which lives: all ranks of its reduction get the error, and the set stays usable."""
    device, found = enter(here), []
    owner: Any = {"_copy": hierarchical_path._ToHosts, "_await": hierarchical_path._FromHosts}[step]

    def fail(*_arguments: Any) -> None:
        raise torch.OutOfMemoryError("no memory at all")

    for _ in range(3):
        with Patch.context() as patch:
            if here.rank == 3:
                patch.setattr(owner, step, fail)
            try:
                mt.allreduce(torch.ones(1000, device=device))
            except (CollectiveError, torch.OutOfMemoryError) as error:
                found.append(str(error))
            mt.barrier()
        assert mt.allreduce(torch.ones(1000, device=device), op="sum").eq(here.size).all()
    return found


def test_a_step_that_fails_on_a_rank() -> None:
    for step, hurt in (("_copy", (0, 1, 2, 3)), ("_await", (2, 3))):
        for rank, found in enumerate(run_cuda(failing, step, hosts=(2, 2))):
            assert len(found) == 3 * (rank in hurt), (step, rank, found)
            for text in found:
                assert "no memory at all" in text
                assert rank == 3 or "rank 3 could not go on: " in text, text


def test_an_error_that_is_its_own_cause() -> None:
    """A thread raises the error of another thread again; looking for its cause ends."""
    error, other = CollectiveError("first"), CollectiveError("second")
    error.__cause__, other.__context__ = other, error
    assert list(hierarchical_path._with_contexts(error)) == [error, other]
    other.__cause__ = other
    assert list(hierarchical_path._with_contexts(other)) == [other]


def late_death(here: Here) -> bool:
    """A rank of a host dies while NCCL reduces there: no wrong share reaches the other host."""
    device = enter(here)
    x = torch.ones(1000, device=device)
    if here.rank == 3:
        Patch().setattr(by_nccl._Reduction, "_follow", die)
        mt.allreduce(x, op="sum")
    try:
        found = mt.allreduce(x, op="sum")
        return bool(found.eq(here.size).all())
    except CollectiveError as error:
        return "rank 3" in str(error)


def test_a_wrong_share_does_not_travel() -> None:
    report = report_of_cuda(late_death, hosts=(2, 2))
    for outcome in report.outcomes[:3]:
        assert outcome.value is True, outcome


def saving(here: Here) -> bool:
    """What a failed reduction left is not saved."""
    device = join(here)
    model: Any = model_of("perceptron", device)
    optimizer = optimizer_of(model)
    state = mt.elastic.TorchState(model, optimizer)
    mean_loss(model, own_batch(here, 0, "perceptron", device)).backward()
    optimizer.step()
    state.save()
    path = paths()[0]
    mt.barrier()
    if here.rank == 3:
        die()
    time.sleep(1.0)
    with pytest.raises(CollectiveError, match="rank 3"):  # noqa: PT012 -- in which call is not known
        mean_loss(model, own_batch(here, 1, "perceptron", device)).backward()
        optimizer.step()
        path.settle()
    return True


def paths() -> Any:
    decisions: Any = current().job_objects.get(path_agreement._Decisions)
    return list(decisions.paths)


def test_saving_after_a_death() -> None:
    report = report_of_cuda(saving, hosts=(2, 2))
    for outcome in report.outcomes[:3]:
        assert outcome.value is True, outcome
