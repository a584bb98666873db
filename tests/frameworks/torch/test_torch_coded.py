"""Wire types that round, with and without error feedback.

The reference uses NumPy's 16-bit types.
"""

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.lossy import SHAPES, expect_same_bits, gradient, hand_over, parameters, residuals
from tests.support.plain import average_, backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from torch import nn

import multiring.torch as mt

WIRES = ("fp16", "bf16", "int8")
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
TYPES: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def optimizer_of(shared: list[nn.Parameter], wire: str, *, error_feedback: bool = True, **options: Any) -> Any:
    optimizer = torch.optim.SGD(shared, lr=0.1, momentum=0.5)
    compression = getattr(mt.Compression, wire)
    return mt.DistributedOptimizer(optimizer, compression=compression, error_feedback=error_feedback, **options)


# ---- the formulas ----


def rounded(value: NDArray[np.float32], wire: str) -> NDArray[np.float32]:
    return value.astype(TYPES[wire]).astype(np.float32)


@pytest.mark.parametrize(("ranks", "engine", "wire"), [(2, "tcp", "bf16"), (3, "tcp", "fp16"), (3, "shm", "bf16")])
def test_residuals_are_what_was_rounded_off(ranks: int, engine: str, wire: str) -> None:
    run_ranks(follow_reference, ranks, wire, engine == "tcp", engine=engine)


def follow_reference(here: Here, wire: str, is_coded: bool) -> None:  # noqa: FBT001
    group = join(here)
    for op, scale in (("average", 1.0), ("sum", float(here.size))):
        shared = parameters()
        optimizer = optimizer_of(shared, wire, op=op, bucket_bytes=100)
        owed = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(here.size)]
        for step in range(4):
            optimizer.zero_grad()
            hand_over(shared, step, here.rank)
            found = residuals(optimizer)
            for i, (shape, parameter) in enumerate(zip(SHAPES, shared, strict=True)):
                whole = [gradient(shape, step, rank, i) + owed[rank][i] for rank in range(here.size)]
                sent = [rounded(each, wire) for each in whole]
                for rank in range(here.size):
                    owed[rank][i] = whole[rank] - sent[rank]
                assert np.array_equal(found[i].numpy(), owed[here.rank][i])
                assert parameter.grad is not None
                exact = scale * np.mean([each.astype(np.float64) for each in sent], axis=0)
                # A sum that crosses a wire is rounded, too.
                bound = (ROUNDOFF[wire] if is_coded else 0) + 2.0**-21
                assert (np.abs(parameter.grad.numpy() - exact) <= bound * np.abs(sent).sum(axis=0)).all()
            optimizer.step()
            expect_same_bits(group, shared)


@pytest.mark.parametrize("wire", WIRES)
def test_nothing_is_lost_for_good(wire: str) -> None:
    """On one host, applied gradients plus residuals equal the sum of all gradients.

    No sum is compressed there.
    """
    run_ranks(conserve, 3, wire, engine="shm")


def conserve(here: Here, wire: str) -> None:
    group = join(here)
    shared = parameters()
    optimizer = optimizer_of(shared, wire)
    handed = [torch.zeros(shape) for shape in SHAPES]
    applied = [torch.zeros(shape) for shape in SHAPES]
    for step in range(6):
        optimizer.zero_grad()
        given = hand_over(shared, step, here.rank)
        for i, parameter in enumerate(shared):
            assert parameter.grad is not None
            handed[i] += given[i]
            applied[i] += parameter.grad
        optimizer.synchronize()
    largest = 0.0
    for i, owed in residuals(optimizer).items():
        mean = owed.contiguous()
        for each in (handed[i], mean):
            average_(group, each)
        assert (applied[i] + mean - handed[i]).abs().max() < 2e-6
        largest = max(largest, float((applied[i] - handed[i]).abs().max()))
    assert largest > 4e-5  # a rounding loss that the residuals compensate


@pytest.mark.parametrize("error_feedback", [False, True])
def test_what_is_too_small_for_a_wire_arrives_in_time(error_feedback: bool) -> None:  # noqa: FBT001
    run_ranks(send_small, 2, error_feedback, engine="tcp")


def send_small(here: Here, error_feedback: bool) -> None:  # noqa: FBT001
    """Send small values beside 1.0; int8 then has no value between 0 and 1/127."""
    join(here)
    weight = nn.Parameter(torch.zeros(64))
    optimizer = optimizer_of([weight], "int8", error_feedback=error_feedback)
    given = torch.full((64,), 0.001)
    given[5] = 1.0
    applied = torch.zeros(64)
    for _ in range(100):
        optimizer.zero_grad()
        backward((weight * given).sum())
        assert weight.grad is not None
        applied += weight.grad
        optimizer.synchronize()
    assert abs(applied[5].item() - 100) < 0.1
    if error_feedback:
        assert (applied[6:] - 0.1).abs().max() < 0.005  # half of 1/127, and some rounding
    else:
        assert not applied[6:].any()


# ---- ranks with different gradients ----


@pytest.mark.parametrize("wire", WIRES)
def test_gradients_that_some_ranks_lack(wire: str) -> None:
    run_ranks(lack_gradients, 2, wire, engine="tcp")


def lack_gradients(here: Here, wire: str) -> None:
    group = join(here)
    shared = parameters(((6, 8), (7,), (3, 5)))
    optimizer = optimizer_of(shared, wire)
    hand_over(shared, 0, here.rank)
    before = residuals(optimizer)
    optimizer.synchronize()
    optimizer.zero_grad()
    # Only rank 1 has a gradient, of the first parameter. A flag beside so large a value would be rounded away.
    if here.rank == 1:
        backward((shared[0] * 1e4 * torch.from_numpy(gradient((6, 8), 9))).sum())
    else:
        optimizer.synchronize()
    assert shared[0].grad is not None
    assert shared[0].grad.abs().max() > 1e3
    assert shared[1].grad is shared[2].grad is None
    expect_same_bits(group, [shared[0].grad])
    after = residuals(optimizer)
    # A residual waits for the parameter's next gradient.
    assert torch.equal(before[0], after[0]) == (here.rank == 0)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize(("wire", "worst"), [("fp16", 1e6), ("bf16", float("nan")), ("int8", float("inf"))])
def test_one_ranks_overflow(wire: str, worst: float) -> None:
    run_ranks(overflow, 2, wire, worst, engine="tcp")


def overflow(here: Here, wire: str, worst: float) -> None:
    join(here)
    shared = parameters(((6, 8),))
    optimizer = optimizer_of(shared, wire)
    given = torch.ones(6, 8)
    given[2, 3] = worst if here.rank else 1.0
    backward((shared[0] * given).sum())
    assert shared[0].grad is not None
    assert not shared[0].grad[2, 3].isfinite()
    assert residuals(optimizer)[0].isfinite().all()
    optimizer.synchronize()
    optimizer.zero_grad()
    hand_over(shared, 1, here.rank)
    assert shared[0].grad is not None
    assert shared[0].grad.isfinite().all()


# ---- training ----


@pytest.mark.parametrize(
    ("ranks", "engine", "wire", "error_feedback"),
    [(2, "tcp", "fp16", False), (2, "tcp", "int8", True), (4, "shm+tcp", "bf16", True)],
)
def test_training_keeps_parameters_the_same(ranks: int, engine: str, wire: str, *, error_feedback: bool) -> None:
    plain = run_ranks(train, ranks, "none", False, engine=engine)[0]
    for found in run_ranks(train, ranks, wire, error_feedback, engine=engine):
        assert abs(found - plain) < 0.02 * plain


def train(here: Here, wire: str, error_feedback: bool) -> float:  # noqa: FBT001
    group = join(here)
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    compression = getattr(mt.Compression, wire)
    mt.DistributedOptimizer(
        optimizer, model.named_parameters(), compression, error_feedback=error_feedback, bucket_bytes=1000
    )
    losses = []
    for step in range(15):
        optimizer.zero_grad()
        loss = loss_of(model, here.rank + 2 * (step % 5))
        backward(loss)
        optimizer.step()
        expect_same_bits(group, list(model.parameters()))
        losses.append(float(mt.allreduce(loss.detach())))
    return float(np.mean(losses[-5:]))


def test_state_dict_resumes_to_the_bit() -> None:
    run_ranks(resume, 2, engine="tcp")


def resume(here: Here) -> None:
    group = join(here)

    def run(shared: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            hand_over(shared, step, here.rank)
            optimizer.step()

    shared = parameters()
    whole = optimizer_of(shared, "bf16", bucket_bytes=100)
    run(shared, whole, range(3))
    values, state = [each.detach().clone() for each in shared], copy.deepcopy(whole.state_dict())
    run(shared, whole, range(3, 6))
    ends = []
    for kept in (state, {**state, "multiring": {**state["multiring"], "residuals": {}}}):
        again = [nn.Parameter(value.clone()) for value in values]
        # Residuals belong to parameters, so they also fit buckets of another size.
        optimizer = optimizer_of(again, "bf16")
        optimizer.load_state_dict(copy.deepcopy(kept))
        run(again, optimizer, range(3, 6))
        expect_same_bits(group, again)
        ends.append(all(torch.equal(one, other) for one, other in zip(shared, again, strict=True)))
    assert ends == [True, False]


def test_parameters_without_elements() -> None:
    run_ranks(send_nothing, 2, engine="tcp")


def send_nothing(here: Here) -> None:
    join(here)
    shared = parameters(((0, 3), (4,)))
    optimizer_of(shared, "int8", bucket_bytes=1)
    hand_over(shared, 0, here.rank)
    assert shared[0].grad is not None
    assert shared[0].grad.shape == (0, 3)
    assert shared[1].grad is not None
    assert shared[1].grad.any()


def test_bytes_are_those_of_the_wire() -> None:
    padded = 16 * (3 + 1 + 7 + 1)  # each tensor is padded to 64 bytes
    flags = len(SHAPES) + 3
    wanted = [2 * padded + flags, 2 * padded + flags, padded + 4 + flags]
    assert run_ranks(count_bytes, 2) == [wanted] * 2


def count_bytes(here: Here) -> list[int]:
    join(here)
    return [mt.gradient_bytes(optimizer_of(parameters(), wire)) for wire in WIRES]
