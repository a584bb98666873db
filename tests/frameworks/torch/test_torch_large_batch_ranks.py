"""Large batches on ranks: equal trajectories, joint skips of steps, resumption."""

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.large_batch_cases import CASES, scale_of, trained, trained_adaptively
from tests.support.lossy import expect_same_bits
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring._gradients.loss_scale import LossScale
from multiring.convergence import Constant
from multiring.errors import ArgumentError, StateError

# ---- one trajectory ----


# Three ranks train by all cases. An optimizer only sees averages, so on two and four ranks the cases with every switch
# are enough. Twelve steps are past the warm-up of five and grow the loss scale, whose patience is three, several times.
STEPS = 12
EVERYTHING = tuple(name for name in CASES if name.endswith(", everything"))
SHOWN = {2: EVERYTHING, 3: tuple(CASES), 4: EVERYTHING}


# The work takes seconds, but the ranks wait for each other in 300 steps. On a busy machine this takes minutes.
@pytest.mark.parametrize("ranks", SHOWN)
def test_any_ranks_take_the_trajectory_of_one(ranks: int) -> None:
    wanted = {name: alone(name) for name in SHOWN[ranks]}
    for lag in (0, 1):
        wanted[f"AdaScale lag {lag}"] = trained_adaptively(0, 1, ranks, lag=lag)
    for rank, found in enumerate(run_ranks(train_all, ranks, deadline_s=300.0)):
        for name, own in found.items():
            known = wanted.get(name) or alone(name.removeprefix("accumulated "))
            for one, other in zip(own, known, strict=True):
                assert np.abs(one - other.numpy()).max() < 1e-10, (rank, name)
        assert len(found) == len(wanted) + 2 * (ranks < 4)


@cache
def alone(name: str) -> list[Tensor]:
    return trained(name, 0, 1, steps=STEPS)


def train_all(here: Here) -> dict[str, list[Any]]:
    join(here)
    found = {
        name: [each.numpy() for each in trained(name, here.rank, here.size, steps=STEPS)] for name in SHOWN[here.size]
    }
    for lag in (0, 1):
        own = trained_adaptively(here.rank, here.size, here.size, lag=lag)
        found[f"AdaScale lag {lag}"] = [each.numpy() for each in own]
    if here.size < 4:  # with 4 ranks, two backward passes cannot divide a rank's three samples
        for name in ("lag, everything", "LARC clip"):
            own = trained(name, here.rank, here.size, passes=2, steps=STEPS)
            found[f"accumulated {name}"] = [each.numpy() for each in own]
    return found


# ---- overflows ----

OVERFLOWS = {3, 4, 9}  # the steps that overflow


def overflow_cases() -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "fp16 wire": {"compression": mt.Compression.fp16},
        "int8 wire": {"compression": mt.Compression.int8, "error_feedback": True},
        "PowerSGD": {"compression": mt.PowerSGD(rank=1)},
        "accumulation": {"backward_passes_per_step": 2},
        "lag": {},
        "lag, int8 wire": {"compression": mt.Compression.int8, "error_feedback": True},
        "lag, PowerSGD": {"compression": mt.PowerSGD(rank=1)},
        "Muon": {},
    }


def test_one_ranks_infinity_is_skipped_by_all() -> None:
    for found in run_ranks(overflow_all, 2, engine="tcp", deadline_s=240.0):
        for name, skipped in found.items():
            # With lag, a gradient is reduced during the next step, so that step detects the overflow.
            assert skipped == [step + name.startswith("lag") for step in sorted(OVERFLOWS)], name
        assert list(found) == list(overflow_cases())


def overflow_all(here: Here) -> dict[str, list[int]]:
    group = join(here)
    found = {}
    for name, options in overflow_cases().items():
        model = network(torch.float32)
        first, second = mt.parameter_groups(model)
        plain: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), 0.05, 0.5)]
        if name == "Muon":
            plain = [mt.Muon(first["params"], 0.01), torch.optim.SGD(second["params"], 0.05)]
        optimizers = []
        for each in plain:
            own = {id(p) for param_group in each.param_groups for p in param_group["params"]}
            named = [(key, p) for key, p in model.named_parameters() if id(p) in own]
            optimizers.append(mt.DistributedOptimizer(each, named, **options))
        precision = mt.mixed_precision(optimizers, "fp16", scale=LossScale(scale=1024.0))
        if name.startswith("lag"):
            mt.gradient_lag(optimizers[0])
        found[name] = skips(here, model, optimizers, precision, passes=options.get("backward_passes_per_step", 1))
        expect_same_bits(group, list(model.parameters()))
        assert all(each.isfinite().all() for each in model.parameters())
        owed: Any = optimizers[0].state_dict().get("multiring", {}).get("residuals", {})
        assert all(each.isfinite().all() for each in owed.values())
        assert bool(owed) == (name.endswith(("int8 wire", "PowerSGD")))
        assert scale_of(optimizers[0]) == 1024.0 / 8, (name, found[name])
    return found


def skips(here: Here, model: nn.Module, optimizers: list[Any], precision: Any, *, passes: int) -> list[int]:
    """Train twelve steps with overflows on the last rank; return the skipped steps."""
    found = []
    for step in range(12):
        before = precision.skipped
        for each in optimizers:
            each.zero_grad()
        for part in range(passes):
            loss = loss_of(model, 10 * step + 2 * part + here.rank)
            is_bad = step in OVERFLOWS and here.rank == here.size - 1 and part == 0
            precision.backward(loss * (math.inf if is_bad else 1.0))
        for each in optimizers:
            each.step()
        if precision.skipped > before:
            found.append(step)
    return found


def test_a_loss_that_is_not_finite_is_told_on_every_rank() -> None:
    run_ranks(lose, 3)


def lose(here: Here) -> None:
    join(here)
    model = network(torch.float32)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
    precision = mt.mixed_precision(optimizer, "float32")
    for step in range(2):
        optimizer.zero_grad()
        precision.backward(loss_of(model, step + here.rank) * (math.nan if (step, here.rank) == (1, 2) else 1.0))
        before = [each.detach().clone() for each in model.parameters()]
        if not step:
            optimizer.step()
            continue
        with pytest.raises(
            StateError, match=r"step 1: the loss is nan on rank 2. The weights are those of the step bef"
        ):
            optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


# ---- checkpoints ----


def test_checkpoints_go_on_to_the_same_bits(tmp_path: Path) -> None:
    once = run_ranks(resume, 2, str(tmp_path / "last"))
    assert once[0] == once[1]
    # On another number of ranks, the training resumes with the same weights on all ranks.
    others = run_ranks(resume_on_more, 3, str(tmp_path / "last"))
    assert len(set(others)) == 1


def made(seed: int, *, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[Any]]:
    model = network(dtype, seed)
    first, second = mt.parameter_groups(model)
    named = list(model.named_parameters())
    matrices = {id(each) for each in first["params"]}
    muon = mt.DistributedOptimizer(mt.Muon(first["params"], 0.01), [each for each in named if id(each[1]) in matrices])
    adam = mt.DistributedOptimizer(
        mt.LARC(torch.optim.AdamW(second["params"], 0.01)),
        [each for each in named if id(each[1]) not in matrices],
        mt.Compression.int8,
        error_feedback=True,
    )
    for each in (muon, adam):
        mt.gradient_lag(each)
        mt.mixed_precision(each, "fp16", scale=LossScale(scale=256.0, patience=4))
        mt.moving_average(each, model, 0.9)
    mt.noise_scale(muon, samples=6, every=2)
    return model, [muon, adam]


def go(here: Here, model: nn.Module, optimizers: list[Any], steps: range) -> str:
    for step in steps:
        for each in optimizers:
            each.zero_grad()
        bad = math.inf if step in {2, 7} and here.rank == 1 else 1.0
        backward(loss_of(model, 10 * step + here.rank) * scale_of(optimizers[0]) * bad)
        for each in optimizers:
            each.step()
    digest = hashlib.blake2b(digest_size=16)
    kept: list[Tensor] = [each.detach() for each in model.parameters()]
    for optimizer in optimizers:
        state = optimizer.state_dict()["multiring_stages"]
        kept += [*state["average"]["averages"], *state["lag"]["pending"].values()]
    for each in kept:
        digest.update(each.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() + str(optimizers[0].state_dict()["multiring_stages"]["unscale"])


def resume(here: Here, path: str) -> str:
    join(here)
    model, optimizers = made(0)
    go(here, model, optimizers, range(5))
    mt.save(path, model=model, muon=optimizers[0], adam=optimizers[1])
    whole = go(here, model, optimizers, range(5, 12))
    again, others = made(1)
    mt.load(path, model=again, muon=others[0], adam=others[1])
    assert go(here, again, others, range(5, 12)) == whole
    return whole


def resume_on_more(here: Here, path: str) -> str:
    join(here)
    model, optimizers = made(1)
    mt.load(path, model=model, muon=optimizers[0], adam=optimizers[1])
    other = torch.optim.SGD(network(torch.float32).parameters(), 0.1)
    with pytest.raises(ArgumentError, match=r"another optimizer's: it has .*ns_steps.*, and SGD has .*dampening"):
        mt.load(path, muon=other)
    with pytest.raises(ArgumentError, match=r"the checkpoint's optimizer has stages .*average.*and this one has none"):
        mt.load(path, muon=mt.Muon(mt.parameter_groups(model)[0]["params"]))
    with pytest.raises(ArgumentError, match="the checkpoint is another model's"):
        mt.load(path, model=nn.Linear(2, 2))
    return go(here, model, optimizers, range(5, 9))


# ---- the noise scale, AdaScale ----


def test_noise_scale_on_ranks() -> None:
    found = run_ranks(measure, 3)
    assert found[0] == found[1] == found[2]


def measure(here: Here) -> list[float]:
    """Return measured noise scales; the true scale is 16.

    The gradient of the mean of x w is the mean of x, and x has variance 4 around 0.5 in 30 dimensions.
    """
    join(here, check_first_steps=False)  # each rank has its own model, which does not learn
    found = []
    torch.manual_seed(7)
    data = TensorDataset(0.5 + 2.0 * torch.randn(5600, 30, dtype=torch.float64))
    torch.manual_seed(here.rank)
    # The cases divide samples by hand into equal or unequal parts, or by `distribute` (14 samples into 5, 5 and 4).
    for case in ("equal", "sum", "distribute", "lag"):
        if case == "lag":  # repeats the first case's samples; lag never applies the last step
            torch.manual_seed(here.rank)
        weight = nn.Linear(30, 1, bias=False, dtype=torch.float64)
        plain = torch.optim.SGD(weight.parameters(), 0.0)
        batches: Any = DataLoader(data, 14)
        if case == "distribute":
            weight, optimizer, batches = mt.distribute(weight, plain, batches)
        else:
            op = mt.Sum if case == "sum" else mt.Average
            optimizer = mt.DistributedOptimizer(plain, weight.named_parameters(), op=op)
        samples = {"equal": 4, "lag": 4, "sum": 3 + 2 * here.rank, "distribute": None}[case]
        noise = mt.noise_scale(optimizer, samples=samples, every=1, warns=False)
        if case == "lag":
            mt.gradient_lag(optimizer)
        for (batch,) in batches:
            own = (
                batch if case == "distribute" else batch[:4] if case in {"equal", "lag"} else batch[: 3 + 2 * here.rank]
            )
            if case != "distribute":  # each rank draws its own samples
                own = 0.5 + 2.0 * torch.randn(len(own), 30, dtype=torch.float64)
            optimizer.zero_grad()
            outputs = weight(own)
            backward(outputs.sum() / 15 if case == "sum" else outputs.mean())
            optimizer.step()
        assert noise.batch == {"equal": 12, "lag": 12, "sum": 15, "distribute": 14}[case]
        assert noise.value == pytest.approx(16.0, rel=0.12), case
        interval = noise.interval()
        assert interval.low < 16.0 < interval.high
        found.append(noise.value)
    assert found[-1] == pytest.approx(found[0], rel=0.01)
    return found


def test_adascale_on_ranks() -> None:
    run_ranks(scale_adaptively, 2)


def scale_adaptively(here: Here) -> None:
    join(here)
    torch.manual_seed(here.rank)
    weight = nn.Parameter(torch.zeros(20, dtype=torch.float64))
    optimizer = mt.DistributedOptimizer(torch.optim.SGD([weight], 0.01), [("weight", weight)])
    noise = mt.noise_scale(optimizer, samples=4, every=1, warns=False)
    rates = mt.adascale(optimizer, Constant(), noise, scale=2, batch=4)
    for _ in range(400):
        optimizer.zero_grad()
        backward((weight * (0.5 + torch.randn(4, 20, dtype=torch.float64))).sum(dim=1).mean())
        optimizer.step()
    # The variance is 20 / 4 and |G|^2 is 5, so the gain is (5 + 5) / (5/2 + 5).
    assert rates.gain == pytest.approx(4 / 3, rel=0.2)
    assert rates.position == pytest.approx(400 * 4 / 3, rel=0.1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * rates.gain)
    with pytest.raises(StateError, match="the number of samples of a step is not known"):
        unknown()


def unknown() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = mt.DistributedOptimizer(torch.optim.SGD([weight], 0.01), [("weight", weight)])
    mt.noise_scale(optimizer, every=1)
    backward(weight.sum())
    optimizer.step()
