"""Buckets of gradients that NCCL reduces: which ranks use it, what it costs the host, and which orderings it needs."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from tests.cuda.test_gradient_orderings import (
    Compared,
    Mutant,
    by_first_backward,
    by_small_buckets,
    by_streams,
    hasty_zeros,
    slow_down,
)
from tests.standin.torch_devices import host_waits
from tests.support.cuda_torch_ranks import report_of_cuda, run_cuda
from tests.support.device_training import HOST, OPTIMIZERS, Program, join, mean_loss, model_of, own_batch
from tests.support.mutants import LATE, SEEDS, Patch, busy, judged, nothing, require_needed, side_stream
from tests.support.ranks import Here

import multiring.torch as mt
from multiring._runtime.engines.nccl_communicator import NcclCommunicator
from multiring._runtime.engines.nccl_library import NcclError
from multiring.errors import CollectiveError, MismatchError, MultiringError, UnsupportedError
from multiring.torch import path_agreement
from multiring.torch.device_staging import DeviceStaging
from multiring.torch.gradients.nccl_buckets import OnNccl
from multiring.torch.gradients.parameter_gradient import ParameterGradient
from multiring.torch.path_agreement import DevicePath, PathChoice, RankFacts, choice_by

STEPS = 20
SOON_S = 20  # far below the time-out of a stall, with a loaded machine
WARM = 4  # steps that compare the ranks, and allocate


def refuse_staging(*_arguments: Any, **_options: Any) -> None:
    raise AssertionError("a copy through host memory")


def optimizer_of(model: Any, **options: Any) -> Any:
    return mt.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), bucket_bytes=600, **options
    )


def training(here: Here, dtype: torch.dtype, options: dict[str, Any]) -> list[int]:
    """Train; return how often the host waited for the device in each step."""
    device = join(here)
    assert mt.device_path() == "undecided"
    program = Program(bucket_bytes=600, **options)
    expected = program.losses(here, HOST, STEPS)
    assert program.losses(here, device, STEPS) == pytest.approx(expected, rel=1e-6)
    assert mt.device_path() == "nccl"
    model = model_of("perceptron", device).to(dtype)
    optimizer, waits = optimizer_of(model, **options), []
    with Patch.context() as patch:
        for step in range(STEPS):
            if step == WARM:
                patch.setattr(DeviceStaging, "all_to_host", refuse_staging)
                patch.setattr(DeviceStaging, "all_to_device", refuse_staging)
            inputs, targets = (each.to(dtype) for each in own_batch(here, step, "perceptron", device))
            torch.cuda.synchronize()
            before = host_waits()
            optimizer.zero_grad()
            mean_loss(model, (inputs, targets)).backward()
            optimizer.step()
            waits.append(host_waits() - before)
    sums = [float(each.detach().double().sum()) for each in model.parameters()]
    assert mt.allgather_object(sums) == [sums] * here.size
    return waits[WARM:]


@pytest.mark.parametrize(("devices", "dtype"), [(2, "float32"), (4, "float32"), (2, "float64"), (2, "bfloat16")])
def test_a_step_stays_on_the_device(devices: int, dtype: str) -> None:
    found = run_cuda(training, getattr(torch, dtype), {}, devices=devices)
    assert found == [[0] * (STEPS - WARM)] * devices


@pytest.mark.parametrize("options", [{"op": mt.Sum}, {"gradient_predivide_factor": 2.0}])
def test_operations(options: dict[str, Any]) -> None:
    assert run_cuda(training, torch.float32, options, devices=2) == [[0] * (STEPS - WARM)] * 2


# ---- which ranks use NCCL ----


def break_nccl(patch: Patch, broken: str) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise (
            UnsupportedError("no NCCL 2.18.0 or later: libnccl.so.2 is NCCL 2.17.0")
            if broken == "library"
            else (NcclError("ncclCommInitRankConfig: unhandled system error (2)", 2))
        )

    if broken == "library":
        patch.setattr(path_agreement, "find_nccl", refuse)
    elif broken == "communicator":
        patch.setattr(NcclCommunicator, "make", refuse)


def decision(here: Here, settings: list[dict[str, Any]], options: dict[str, Any], broken: str) -> str:
    device = join(here, **settings[here.rank % len(settings)])
    with Patch.context() as patch:
        break_nccl(patch, broken if here.rank == 1 else "")
        began_s = time.monotonic()
        try:
            losses = Program(bucket_bytes=600, **options).losses(here, device, 2)
        except MultiringError as error:
            return f"{type(error).__name__}: {error}"
    assert all(loss > 0 for loss in losses[:2])
    assert time.monotonic() - began_s < SOON_S
    return mt.device_path()


def decided(*settings: dict[str, Any], broken: str = "", **options: Any) -> set[str]:
    standin = {"devices": options.pop("gpus", 2)}
    return set(run_cuda(decision, list(settings), options, broken, devices=2, standin=standin))


def test_what_decides() -> None:
    assert decided({}) == {"nccl"}
    assert decided({"device_path": "nccl"}) == {"nccl"}
    assert decided({"device_path": "staged"}) == {"staged: MULTIRING_DEVICE_PATH=staged"}
    assert decided({}, compression="bf16") == {"nccl"}  # inside a host nothing is rounded
    by_host = {"staged: gradients are compressed on the host"}
    assert decided({}, compression="bf16", error_feedback=True) == by_host
    assert decided({"device_path": "nccl"}, compression=mt.PowerSGD(rank=1)) == by_host
    shared = "ranks 0 and 1 share the GPU 0000:01:00 of their host, and NCCL needs a GPU for each rank"
    assert decided({}, gpus=1) == {f"staged: {shared}"}
    (text,) = decided({"device_path": "nccl"}, gpus=1)
    assert text.startswith(f"UnsupportedError: MULTIRING_DEVICE_PATH=nccl, but ranks [0, 1] cannot use NCCL: {shared}")
    lacks = "rank 1: no NCCL 2.18.0 or later: libnccl.so.2 is NCCL 2.17.0"
    assert decided({}, broken="library") == {f"staged: {lacks}"}
    (text,) = decided({"device_path": "nccl"}, broken="library")
    assert text.startswith(f"UnsupportedError: MULTIRING_DEVICE_PATH=nccl, but ranks [0, 1] cannot use NCCL: {lacks}")
    refused = "rank 1: ncclCommInitRankConfig: unhandled system error (2)"
    assert decided({}, broken="communicator") == {f"staged: NCCL cannot be started: {refused}"}
    (text,) = decided({"device_path": "nccl"}, {})
    assert text.startswith("MismatchError: the ranks differ: rank 0: MULTIRING_DEVICE_PATH=nccl; rank 1: ")


def test_reasons() -> None:
    good = [RankFacts("auto", gpu=f"0000:0{rank}:00", version=22809) for rank in range(2)]
    assert choice_by(good, [(0, 1)], (4, 6)) == PathChoice("nccl")
    assert choice_by(good, [(0,), (1,)], (4, 6)) == PathChoice("staged", "each of the 2 hosts has one rank")
    assert choice_by(good[:1], [(0,)], (4,)) == PathChoice("staged", "there is a single rank")
    other = RankFacts("auto", gpu="0000:01:00", version=21800)
    differ = "the versions of NCCL differ: rank 4: NCCL 2.28.9; rank 6: NCCL 2.18.0"
    assert choice_by([good[0], other], [(0, 1)], (4, 6)) == PathChoice("staged", differ)


# ---- failures ----


def differing(here: Here) -> tuple[str, float]:
    """Start different buckets on the ranks; return the error, and an average of the next reduction."""
    device = join(here)
    optimizer = optimizer_of(model_of("perceptron", device))
    first, second = [bucket.reduction for bucket in optimizer._reducer._assignment.buckets][:2]
    assert isinstance(first, OnNccl)
    assert isinstance(second, OnNccl)
    first.start()()
    wait = (first, second)[here.rank].start()
    with pytest.raises(MismatchError) as error:
        wait()
    for place in first.places:
        place.fill_(here.rank + 1.0)
    first.start()()
    return str(error.value), float(first.places[0].mean())


def test_buckets_that_differ() -> None:
    for text, mean in run_cuda(differing, devices=2):
        assert "the ranks do not agree" in text
        assert mean == 1.5


class Unstarted:
    """The handle of an operation that was never given to the device."""

    def order(self, stream: int) -> None:
        """Do not wait."""


def saving(here: Here) -> bool:
    """A rank dies after the ranks' agreement, before NCCL has done its part: what the others keep is not saved."""
    device = join(here)
    model: Any = model_of("perceptron", device)
    optimizer = optimizer_of(model)
    state = mt.elastic.TorchState(model, optimizer)
    saved = model[0].weight.clone()
    with Patch.context() as patch:
        if here.rank:
            patch.setattr(DevicePath, "all_reduce", lambda *_arguments, **_options: Unstarted())
        mean_loss(model, own_batch(here, 0, "perceptron", device)).backward()
        optimizer.step()
    if here.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    for save in (state.save, lambda: mt.save("/nowhere", model=model)):
        began_s = time.monotonic()
        with pytest.raises(CollectiveError, match="rank 1 died"):
            save()
        assert time.monotonic() - began_s < SOON_S
    state.restore()
    return torch.equal(model[0].weight, saved)


def test_a_failed_reduction_is_not_saved() -> None:
    report = report_of_cuda(saving, devices=2)
    assert report.outcomes[0].value is True, report.outcomes[0]


# ---- orderings ----


def hasty_start(patch: Patch) -> None:
    """Start NCCL without regard to the work of the caller's stream."""
    original = OnNccl.post

    def post(self: OnNccl) -> Any:
        with torch.cuda.stream(side_stream()):
            return original(self)

    patch.setattr(OnNccl, "_await_writers", nothing)
    patch.setattr(OnNccl, "post", post)


def delay_gradients(patch: Patch) -> None:
    original = ParameterGradient.take_in

    def take_in(self: ParameterGradient, gradient: torch.Tensor, *, hands_out: bool) -> None:
        if gradient.is_cuda:
            busy()
        original(self, gradient, hands_out=hands_out)

    patch.setattr(ParameterGradient, "take_in", take_in)


MUTANTS: dict[str, Mutant] = {
    "NCCL before the gradients": (by_small_buckets, hasty_start),
    "kernels before NCCL": (by_small_buckets, lambda patch: patch.setattr(OnNccl, "come_after", nothing)),
    "NCCL before the other streams": (by_streams, lambda patch: patch.setattr(OnNccl, "_await_writers", nothing)),
    "gradients before the zeros": (by_first_backward, lambda patch: hasty_zeros(patch, OnNccl)),
}


def caught(here: Here) -> dict[str, tuple[bool, bool]]:
    """Return for each mutant whether the program is right without it, and with it, on this rank."""
    device = join(here, check_first_steps=False)  # it finds many a mutant

    def prepare(patch: Patch, _program: object) -> None:
        slow_down(here, patch)
        delay_gradients(patch)

    found = judged(MUTANTS, Compared(here, device).is_right, prepare)
    assert mt.device_path() == "nccl"
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int) -> None:
    require_needed(run_cuda(caught, devices=2, standin={"seed": seed, **LATE}))
