"""PowerSGD against the paper's formulas in NumPy, and checks that always hold."""

import copy
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.lossy import SHAPES, expect_same_bits, gradient, hand_over, parameters, residuals
from tests.support.plain import average_, backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring
import multiring.torch as mt
from multiring._gradients.powersgd import Stages
from multiring.errors import StateError

RANK = 1
COMPRESSED = (0, 2)  # indices into SHAPES


def optimizer_of(shared: list[nn.Parameter], **options: Any) -> Any:
    options = {"compression": mt.PowerSGD(RANK), **options}
    return mt.DistributedOptimizer(torch.optim.SGD(shared, lr=0.1, momentum=0.5), **options)


# ---- the formulas ----


def as_matrix(value: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return a gradient as PowerSGD's matrix.

    A convolution's columns are in the order of channels_last.
    """
    moved = value.transpose(0, 2, 3, 1) if value.ndim == 4 else value
    return moved.reshape(len(value), -1).astype(np.float64)


class Reference:
    """Algorithms 1 and 2 of the paper for one matrix on all ranks, in float64 with QR."""

    def __init__(self, ranks: int, query: NDArray[np.float64]) -> None:
        self.residuals: list[Any] = [0.0] * ranks
        self.query = query

    def step(self, gradients: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        owed = [each + residual for each, residual in zip(gradients, self.residuals, strict=True)]
        p, _ = np.linalg.qr(np.mean([each @ self.query for each in owed], axis=0))
        queries = [each.T @ p for each in owed]
        self.residuals = [each - p @ query.T for each, query in zip(owed, queries, strict=True)]
        self.query = np.mean(queries, axis=0)
        return np.asarray(p @ self.query.T)


@pytest.mark.parametrize(("ranks", "bucket_bytes", "engine"), [(2, 25 << 20, "shm"), (3, 64, "shm"), (4, 200, "tcp")])
def test_gradients_are_the_papers(ranks: int, bucket_bytes: int, engine: str) -> None:
    run_ranks(follow_reference, ranks, bucket_bytes, engine=engine)


def follow_reference(here: Here, bucket_bytes: int) -> None:
    group = join(here)
    for op, scale in (("average", 1.0), ("sum", float(here.size))):
        shared = parameters()
        optimizer = optimizer_of(shared, bucket_bytes=bucket_bytes, op=op)
        queries = optimizer.state_dict()["multiring"]["queries"]
        references = {i: Reference(here.size, queries[i].double().numpy()) for i in COMPRESSED}
        for step in range(4):
            optimizer.zero_grad()
            hand_over(shared, step, here.rank)
            for i, (shape, parameter) in enumerate(zip(SHAPES, shared, strict=True)):
                everybodys = [gradient(shape, step, rank, i) for rank in range(here.size)]
                assert parameter.grad is not None
                if i in COMPRESSED:
                    wanted = scale * references[i].step([as_matrix(each) for each in everybodys])
                    assert np.abs(as_matrix(parameter.grad.numpy()) - wanted).max() < 1e-4
                    own = as_matrix(residuals(optimizer)[i].numpy())
                    assert np.abs(own - references[i].residuals[here.rank]).max() < 1e-4
                else:
                    exact = scale * np.mean(everybodys, axis=0)
                    assert np.abs(parameter.grad.numpy() - exact).max() < 1e-6
            optimizer.step()
            expect_same_bits(group, shared)


def test_nothing_is_lost_for_good() -> None:
    run_ranks(conserve, 3)


def conserve(here: Here) -> None:
    """The applied gradients plus all ranks' residuals equal the sum of all gradients."""
    group = join(here)
    shared = parameters()
    optimizer = optimizer_of(shared)
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
    for i in COMPRESSED:
        owed = residuals(optimizer)[i].contiguous()
        for each in (handed[i], owed):
            average_(group, each)
        assert (applied[i] - handed[i]).abs().max() > 0.1  # a compression loss that the residuals compensate
        assert (applied[i] + owed - handed[i]).abs().max() < 1e-5


def test_low_rank_gradients_are_exact() -> None:
    run_ranks(send_rank_one, 2)


def send_rank_one(here: Here) -> None:
    """Send gradients whose rank is below that of the factors.

    The unused columns of the factors must be zero, not noise.
    """
    join(here)
    weight = nn.Parameter(torch.zeros(20, 30))
    optimizer = optimizer_of([weight], compression=mt.PowerSGD(3))
    left, right = torch.arange(20.0), torch.linspace(-1, 1, 30)
    for step in range(3):
        optimizer.zero_grad()
        given = torch.outer(left + step, right)
        backward((weight * given).sum())
        assert weight.grad is not None
        assert torch.allclose(weight.grad, given, rtol=0, atol=1e-4)
        optimizer.synchronize()
    # Unused directions are kept for later gradients.
    assert (optimizer.state_dict()["multiring"]["queries"][0].norm(dim=0) > 0.99).all()
    optimizer.zero_grad()
    backward((weight * torch.outer(right[:20], torch.arange(30.0))).sum())
    assert weight.grad is not None
    assert torch.allclose(weight.grad, torch.outer(right[:20], torch.arange(30.0)), rtol=0, atol=1e-4)


# ---- ranks with different gradients ----


def test_gradients_that_some_ranks_lack() -> None:
    run_ranks(lack_gradients, 2)


def lack_gradients(here: Here) -> None:
    group = join(here)
    shared = parameters(((6, 8), (6, 8), (6, 8)))
    optimizer = optimizer_of(shared, bucket_bytes=1)
    hand_over(shared, 0, here.rank)
    before = residuals(optimizer)
    for _ in range(2):
        optimizer.synchronize()
        optimizer.zero_grad()
        if here.rank == 1:  # only rank 1 has a gradient, of the first parameter
            carried = optimizer.state_dict()["multiring"]
            given = torch.from_numpy(gradient((6, 8), 9))
            backward((shared[0] * given).sum())
            whole = (carried["residuals"][0] + given).double()
            p, _ = torch.linalg.qr(whole @ carried["queries"][0].double())
            assert shared[0].grad is not None
            assert (shared[0].grad - p @ p.T @ whole / 2).abs().max() < 1e-5
        else:
            optimizer.synchronize()
        assert shared[0].grad is not None
        assert shared[0].grad.abs().max() > 0.01
        assert shared[1].grad is shared[2].grad is None
        expect_same_bits(group, [shared[0].grad])
    after = residuals(optimizer)
    # A residual waits for the parameter's next gradient.
    assert torch.equal(before[0], after[0]) == (here.rank == 0)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("worst", [float("inf"), float("nan"), 3e38])
def test_one_ranks_overflow(worst: float) -> None:
    run_ranks(overflow, 2, worst)


def overflow(here: Here, worst: float) -> None:
    """All ranks detect a gradient that is not finite, and no residual contains it."""
    join(here)
    shared = parameters(((6, 8),))
    optimizer = optimizer_of(shared)
    hand_over(shared, 0, here.rank)
    before = residuals(optimizer)[0]
    optimizer.synchronize()
    optimizer.zero_grad()
    given = torch.ones(6, 8)
    given[2, 3] = worst if here.rank else 1.0
    given[4] = worst if here.rank else 1.0
    backward((shared[0] * given).sum())
    assert shared[0].grad is not None
    assert not shared[0].grad.isfinite().all()
    assert np.isfinite(worst) or not shared[0].grad.isfinite().any()
    after = residuals(optimizer)[0]
    assert after.isfinite().all()
    if here.rank == 0 and not np.isfinite(worst):
        assert torch.allclose(before, after, rtol=0, atol=1e-6)
    optimizer.synchronize()
    optimizer.zero_grad()
    hand_over(shared, 1, here.rank)
    assert shared[0].grad is not None
    assert shared[0].grad.isfinite().all()


# ---- training ----


def test_training_keeps_parameters_the_same() -> None:
    plain = run_ranks(train, 3, mt.Compression.none)[0]
    for compressed in run_ranks(train, 3, mt.PowerSGD(2)):
        assert compressed[-1] < compressed[0] / 2
        assert abs(compressed[-1] - plain[-1]) < 0.1 * plain[0]


def train(here: Here, compression: Any) -> list[float]:
    group = join(here)
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    mt.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, bucket_bytes=300)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, here.rank + 3 * (step % 5))
        backward(loss)
        optimizer.step()
        expect_same_bits(group, list(model.parameters()))
        losses.append(float(mt.allreduce(loss.detach())))
    return [float(np.mean(losses[:5])), float(np.mean(losses[-5:]))]


class Pause(torch.autograd.Function):
    """Holds the backward pass until both reductions of a bucket have ended."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        ended, deadline = 0, time.monotonic() + 240
        while ended < 2:
            assert time.monotonic() < deadline, f"{ended} reductions ended while backward was running"
            ended += sum(each.kind == "operation" for each in multiring.drain_events())
        return gradients[0]


def test_both_reductions_go_on_while_backward_runs() -> None:
    run_ranks(reduce_meanwhile, 2)


def reduce_meanwhile(here: Here) -> None:
    join(here)
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    optimizer = optimizer_of([*first.parameters(), *second.parameters()], bucket_bytes=1)
    multiring.drain_events()
    backward(second(Pause.apply(first(torch.ones(2, 8)))).sum())  # type: ignore[no-untyped-call]
    assert sum(each.kind == "operation" for each in multiring.drain_events()) == 2
    optimizer.step()


def test_processors_that_round_differently() -> None:
    run_ranks(round_differently, 2)


def round_differently(here: Here) -> None:
    """Make torch's matrix products differ between ranks, as on unlike machines.

    The gradients must not differ.
    """
    group = join(here)
    plain = torch.mm

    def product(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        return plain(left, right, out=out).mul_(1 + here.rank * 1e-6)

    torch.mm = product  # type: ignore[assignment]
    shared = parameters()
    optimizer = optimizer_of(shared)
    for step in range(3):
        optimizer.zero_grad()
        hand_over(shared, step, here.rank)
        expect_same_bits(group, [each.grad for each in shared])
        optimizer.synchronize()
        expect_same_bits(group, list(optimizer.state_dict()["multiring"]["queries"].values()))


def test_several_backwards() -> None:
    run_ranks(add_up, 2)


def add_up(here: Here) -> None:
    group = join(here)
    shared = parameters()
    optimizer = optimizer_of(shared, backward_passes_per_step=2)
    once = parameters()
    other = optimizer_of(once)
    for step in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        given = hand_over(shared, 2 * step, here.rank)
        for i, more in enumerate(hand_over(shared, 2 * step + 1, here.rank)):
            given[i] = given[i] + more
        backward(torch.stack([(each * value).sum() for each, value in zip(once, given, strict=True)]).sum())
        for parameter, expected in zip(shared, once, strict=True):
            assert parameter.grad is not None
            assert expected.grad is not None
            assert torch.allclose(parameter.grad, expected.grad, rtol=0, atol=1e-5)
        expect_same_bits(group, [each.grad for each in shared])
        optimizer.synchronize()
        other.synchronize()


def test_bytes_are_those_of_the_factors() -> None:
    assert run_ranks(count_bytes, 2) == [(4 * (6 + 8 + 4 + 27 + 7 + 4 + 4 + 3), 4 * (48 + 7 + 108 + 4))] * 2


def count_bytes(here: Here) -> tuple[int, int]:
    join(here)
    compressed = mt.gradient_bytes(optimizer_of(parameters()))
    padded = mt.gradient_bytes(optimizer_of(parameters(), compression=mt.Compression.none))
    return compressed, padded - 4 * (len(SHAPES) + 3 + 9 + 4 + 12)  # less flags and padding to 64 bytes


# ---- compression state ----


def test_state_dict_resumes_to_the_bit() -> None:
    run_ranks(resume, 2)


def resume(here: Here) -> None:
    group = join(here)

    def run(shared: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            hand_over(shared, step, here.rank)
            optimizer.step()

    shared = parameters()
    whole = optimizer_of(shared, bucket_bytes=100)
    run(shared, whole, range(3))
    values, state = [each.detach().clone() for each in shared], copy.deepcopy(whole.state_dict())
    carried = state["multiring"]
    assert (carried["rank"], carried["size"]) == (here.rank, here.size)
    assert sorted(carried["residuals"]) == sorted(carried["queries"]) == list(COMPRESSED)
    assert carried["residuals"][2].shape == (4, 3, 3, 3)
    run(shared, whole, range(3, 6))
    ends = []
    for forgotten in ("", "residuals", "queries"):
        again = [nn.Parameter(value.clone()) for value in values]
        # Compression state belongs to parameters, so it also fits buckets of another size.
        optimizer = optimizer_of(again, compression=mt.PowerSGD(RANK, seed=8))
        kept = {name: value for name, value in carried.items() if name != forgotten}
        optimizer.load_state_dict(copy.deepcopy({**state, "multiring": kept}))
        run(again, optimizer, range(3, 6))
        expect_same_bits(group, again)
        ends.append([torch.equal(one, other) for one, other in zip(shared, again, strict=True)])
    assert ends == [[True] * 4, *[[False, True, False, True]] * 2], ends
    # A new DistributedOptimizer keeps the compression state, too.
    again = [nn.Parameter(value.clone()) for value in values]
    optimizer = optimizer_of(again)
    optimizer.load_state_dict(copy.deepcopy(state))
    mt.DistributedOptimizer(optimizer, compression=mt.PowerSGD(RANK), bucket_bytes=64)
    run(again, optimizer, range(3, 4))
    optimizer.add_param_group({"params": parameters(((5, 5),))})
    run(again, optimizer, range(4, 6))
    assert all(torch.equal(one, other) for one, other in zip(shared, again, strict=True))
    # A plain optimizer ignores the compression state.
    torch.optim.SGD(parameters(), lr=0.1).load_state_dict(state)


def test_broadcast_leaves_residuals() -> None:
    run_ranks(broadcast_state, 2)


def broadcast_state(here: Here) -> None:
    group = join(here)
    shared = parameters()
    optimizer = optimizer_of(shared)
    hand_over(shared, 0, here.rank)
    optimizer.step()
    own = residuals(optimizer)
    if here.rank:
        state = optimizer.state_dict()
        for query in state["multiring"]["queries"].values():
            query.fill_(1.0)
        optimizer.load_state_dict(state)
    mt.broadcast_optimizer_state(optimizer, root_rank=0)
    for i, residual in residuals(optimizer).items():
        assert torch.equal(residual, own[i])
    expect_same_bits(group, list(optimizer.state_dict()["multiring"]["queries"].values()))


# ---- the order of second reductions ----


def test_second_reductions_take_turns() -> None:
    """Second reductions start in bucket order, whichever first reduction ends first."""
    stages = Stages(None, None)  # type: ignore[arg-type]
    turns = [stages.next_turn() for _ in range(3)]
    order: list[int] = []

    def start(bucket: int) -> None:
        before, posted = turns[bucket]
        before.result(240)
        order.append(bucket)
        posted.set_result(None)

    threads = [threading.Thread(target=start, args=(bucket,)) for bucket in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert order == [0, 1, 2]


def test_none_starts_behind_one_that_failed() -> None:
    stages = Stages(None, None)  # type: ignore[arg-type]
    (_, failed), (before, _) = stages.next_turn(), stages.next_turn()
    failed.set_exception(StateError("out of step"))
    with pytest.raises(StateError, match="out of step"):
        before.result(0)
