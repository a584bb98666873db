"""Optimizers and step stages in one process: against formulas, optax and torch."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.large_batch_cases import scaled_and_lagged
from tests.support.plain import backward, loss_of, network
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring._gradients.loss_scale import LossScale
from multiring.convergence import Constant, Steps, Warmup
from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.torch.optim.division import owners_of

STEPS = 5


def weights(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in ((4, 3), (5,), (2, 2, 2))]


def gradient(step: int, number: int, shape: Any) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def train(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = STEPS, scale: float = 1
) -> None:
    for step in range(steps):
        for number, each in enumerate(parameters):
            each.grad = scale * gradient(step, number, each.shape).to(each.dtype)
        optimizer.step()


def by_optax(name: str, *numbers: float, **options: Any) -> list[Any]:
    """Return the result of an optax rule on `weights()`.

    JAX is loaded in a process that does not fork.
    """
    [found] = run_ranks(optaxs, 1, name, numbers, options)
    return list(found)


def optaxs(_: Here, name: str, numbers: tuple[float, ...], options: dict[str, Any]) -> list[Any]:
    import jax  # noqa: PLC0415 -- only for this reference
    import optax  # noqa: PLC0415

    rule = getattr(optax, name)(*numbers, **options)
    with jax.enable_x64(True):
        values = [np.asarray(each.detach()) for each in weights()]
        state = rule.init(values)
        for step in range(STEPS):
            gradients = [gradient(step, number, each.shape).numpy() for number, each in enumerate(values)]
            updates, state = rule.update(gradients, state, values)
            values = optax.apply_updates(values, updates)
        return [np.asarray(each) for each in values]


def expect(parameters: list[nn.Parameter], wanted: list[Any], bound: float = 1e-12) -> None:
    for own, other in zip(parameters, wanted, strict=True):
        assert np.abs(own.detach().numpy() - np.asarray(other)).max() < bound


# ---- LARS, LAMB ----


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_is_optax(nesterov: bool) -> None:  # noqa: FBT001
    own = weights()
    train(mt.LARS(own, 0.3, weight_decay=0.01, trust_coefficient=0.1, form="optax", nesterov=nesterov), own)
    expect(own, by_optax("lars", 0.3, 0.01, trust_coefficient=0.1, nesterov=nesterov))


@pytest.mark.parametrize("form", ["paper", "optax", "timm"])
def test_lars_is_its_formula_while_the_rate_changes(form: str) -> None:
    own = weights()
    optimizer = mt.LARS(own, 1.0, weight_decay=0.01, trust_coefficient=0.1, form=form)
    mt.schedule_learning_rate(optimizer, Steps((2,), 0.5))
    values = [each.detach().numpy().copy() for each in own]
    buffers = [np.zeros_like(each) for each in values]
    for step in range(STEPS):
        rate = 0.5 if step >= 2 else 1.0
        for number, w in enumerate(values):
            g = gradient(step, number, w.shape).numpy()
            own[number].grad = torch.from_numpy(g.copy())
            d = g + 0.01 * w
            norms = np.linalg.norm(g) + 0.01 * np.linalg.norm(w)
            ratio = 0.1 * np.linalg.norm(w) / (np.linalg.norm(d) if form == "optax" else norms)
            buffers[number] = 0.9 * buffers[number] + ratio * d * (1.0 if form == "timm" else rate)
            values[number] = w - buffers[number] * (rate if form == "timm" else 1.0)
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.step()
    expect(own, values)


def test_lars_does_not_see_the_gradients_scale() -> None:
    ends = []
    for scale in (1.0, 1024.0, 2.0**-40):
        own = weights()
        train(mt.LARS(own, 0.3, trust_coefficient=0.1), own, scale=scale)
        ends.append([each.detach().clone() for each in own])
    for other in ends[1:]:
        assert all(torch.equal(one, each) for one, each in zip(ends[0], other, strict=True))


def test_groups_without_a_ratio_step_as_sgd() -> None:
    own, plain = weights(), weights()
    train(mt.LARS([{"params": own, "trust_ratio": False}], 0.1, weight_decay=0.01, form="timm"), own)
    train(torch.optim.SGD(plain, 0.1, 0.9, weight_decay=0.01), plain)
    expect(own, [each.detach() for each in plain], 1e-14)


def test_lamb_is_optax() -> None:
    own = weights()
    train(mt.LAMB(own, 0.02, weight_decay=0.05), own)
    expect(own, by_optax("lamb", 0.02, weight_decay=0.05))


def test_lamb_without_a_ratio_is_adamw() -> None:
    own, plain = weights(), weights()
    train(mt.LAMB([{"params": own, "trust_ratio": False}], 0.02, weight_decay=0.05), own)
    train(torch.optim.AdamW(plain, 0.02, eps=1e-6, weight_decay=0.05), plain)
    expect(own, [each.detach() for each in plain], 1e-14)


def test_lambs_other_forms_are_their_formulas() -> None:
    own = weights()
    options: dict[str, Any] = {"bias_correction": False, "limits": (0.5, 1.5), "clip": 1.2}
    optimizer = mt.LAMB(own, 0.02, weight_decay=0.05, **options)
    mt.clip_gradients(optimizer, 1.0)
    train(optimizer, own)
    values = [each.detach().numpy().copy() for each in weights()]
    first, second = [np.zeros_like(each) for each in values], [np.zeros_like(each) for each in values]
    for step in range(STEPS):
        gradients = [gradient(step, number, each.shape).numpy() for number, each in enumerate(values)]
        norm = math.sqrt(sum((each**2).sum() for each in gradients))
        for number, w in enumerate(values):
            g = gradients[number] / max(1.0, norm)
            first[number] = 0.9 * first[number] + 0.1 * g
            second[number] = 0.999 * second[number] + 0.001 * g**2
            u = first[number] / (np.sqrt(second[number]) + 1e-6) + 0.05 * w
            ratio = min(1.2, float(np.clip(np.linalg.norm(w), 0.5, 1.5) / np.linalg.norm(u)))
            values[number] = w - 0.02 * ratio * u
    expect(own, values)


def test_layers_of_zeros_begin_to_move() -> None:
    for make in (lambda each: mt.LARS(each, 0.1), lambda each: mt.LAMB(each, 0.1)):
        zero = nn.Parameter(torch.zeros(3))
        optimizer = make([zero])
        zero.grad = torch.ones(3)
        optimizer.step()
        assert zero.abs().min() > 0.01
        zero.grad = torch.zeros(3)
        optimizer.step()
        assert zero.isfinite().all()


# ---- LARC ----


@pytest.mark.parametrize("mode", ["clip", "scale"])
def test_larc_around_sgd_is_its_formula(mode: str) -> None:
    own = weights()
    optimizer = mt.LARC(torch.optim.SGD(own, 0.5, 0.9, weight_decay=0.01), trust_coefficient=0.1, mode=mode, eps=0.0)
    train(optimizer, own)
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    values = [each.detach().numpy().copy() for each in weights()]
    buffers = [np.zeros_like(each) for each in values]
    for step in range(STEPS):
        for number, w in enumerate(values):
            g = gradient(step, number, w.shape).numpy()
            ratio = 0.1 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.01 * np.linalg.norm(w))
            ratio = min(ratio / 0.5, 1.0) if mode == "clip" else ratio
            buffers[number] = 0.9 * buffers[number] + ratio * (g + 0.01 * w)
            values[number] = w - 0.5 * buffers[number]
    expect(own, values)


@pytest.mark.parametrize("mode", ["clip", "scale"])
def test_larc_around_adam_scales_its_step(mode: str) -> None:
    own = weights()
    train(mt.LARC(torch.optim.Adam(own, 0.5), trust_coefficient=0.1, mode=mode, eps=0.0), own)
    values = [each.detach().numpy().copy() for each in weights()]
    first, second = [np.zeros_like(each) for each in values], [np.zeros_like(each) for each in values]
    for step in range(STEPS):
        for number, w in enumerate(values):
            g = gradient(step, number, w.shape).numpy()
            first[number] = 0.9 * first[number] + 0.1 * g
            second[number] = 0.999 * second[number] + 0.001 * g**2
            root = np.sqrt(second[number] / (1 - 0.999 ** (step + 1))) + 1e-8
            u = first[number] / (1 - 0.9 ** (step + 1)) / root
            ratio = 0.1 * np.linalg.norm(w) / np.linalg.norm(u)
            values[number] = w - (min(0.5, ratio) if mode == "clip" else 0.5 * ratio) * u
    expect(own, values, 1e-10)


def test_larc_before_adams_moments_changes_little() -> None:
    """The order is the published one; Adam's moments cancel a constant ratio."""
    own, plain = weights(), weights()
    train(mt.LARC(torch.optim.Adam(own, 1e-4), mode="scale", order="before_moments"), own)
    train(torch.optim.Adam(plain, 1e-4), plain)
    for one, other, start in zip(own, plain, weights(), strict=True):
        assert (one - other).norm() < 0.3 * (other - start).norm()


def test_larc_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UnsupportedError, match="LARC around RMSprop, whose step it does not know; want SGD"):
        mt.LARC(torch.optim.RMSprop(weights()))
    with pytest.raises(ArgumentError, match="mode='clap'"):
        mt.LARC(torch.optim.SGD(weights(), 0.1), mode="clap")
    optimizer = mt.LARC(torch.optim.SGD(weights(), 0.1))
    with pytest.raises(StateError, match="has a stage 'trust' already"):
        mt.LARC(optimizer)


# ---- Muon ----


def matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((6, 4), (3, 9), (5, 5))]


@pytest.mark.parametrize("rate", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_torchs(rate: str | None, nesterov: bool) -> None:  # noqa: FBT001
    own, plain = matrices(), matrices()
    train(mt.Muon(own, 0.1, adjust_lr_fn=rate, nesterov=nesterov), own)
    train(torch.optim.Muon(plain, 0.1, adjust_lr_fn=rate, nesterov=nesterov), plain)
    assert all(torch.equal(one, other) for one, other in zip(own, plain, strict=True))


def test_a_copy_of_muon_steps_like_it() -> None:
    own = matrices()
    muon = mt.Muon(own, 0.1, iteration=mt.NewtonSchulz(precision=torch.float32))
    train(muon, own)
    copied = copy.deepcopy(muon)
    others = copied.param_groups[0]["params"]
    for each, parameters in ((muon, own), (copied, others)):
        train(each, parameters)
    assert all(torch.equal(one, other) for one, other in zip(own, others, strict=True))


def test_muon_makes_singular_values_alike() -> None:
    # From zero weights and without decay, one step equals the update.
    filters = nn.Parameter(torch.zeros(4, 2, 3, 3))
    optimizer = mt.Muon([filters], 1.0, weight_decay=0.0)
    filters.grad = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    values = torch.linalg.svdvals(filters.detach().view(4, 18))
    assert 0.5 < values.min() <= values.max() < 1.5


def test_matrices_are_dealt_by_their_cost() -> None:
    costs = [786, 1, 786, 1, 98]
    assert owners_of(costs, [0.0] * 2) == [0, 1, 1, 1, 0]
    assert owners_of(costs, [0.0] * 3) == [0, 2, 1, 2, 2]
    assert owners_of(costs, [0.0] * 1) == [0] * 5


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ArgumentError, match=r"Muon of a parameter, .*want matrices"):
        mt.Muon(weights())


# ---- groups ----


def test_parameter_groups() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    decayed, others = mt.parameter_groups(model, weight_decay=0.1)
    assert [each.dim() for each in decayed["params"]] == [4, 2]
    assert [each.dim() for each in others["params"]] == [1] * 4
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (decayed["trust_ratio"], others["trust_ratio"]) == (True, False)
    assert len(mt.parameter_groups(model, without=lambda name, _: name.startswith("2"))[1]["params"]) == 2
    torch.optim.AdamW(mt.parameter_groups(model, trust_ratio=False))
    with pytest.raises(ArgumentError, match="no parameter"):
        mt.parameter_groups(nn.ReLU())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda each: mt.LARS(each, -1.0), "lr=-1.0"),
        (lambda each: mt.LARS(each, 0.1, momentum=1.0), "momentum=1.0"),
        (lambda each: mt.LARS(each, 0.1, form="thesis"), "form='thesis': want 'paper' or 'optax' or 'timm'"),
        (lambda each: mt.LAMB(each, betas=(0.9, 1.0)), "betas=1.0"),
        (lambda each: mt.LAMB(each, limits=(2.0, 1.0)), "limits="),
        (lambda each: mt.LARS([{"params": each, "trust_ratio": 3}], 0.1), "trust_ratio=3"),
    ],
)
def test_numbers_out_of_range(make: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        make(weights())


# ---- lag ----


def lagged(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(loss_of(model, step))
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lag_is_delayed_sgd_to_the_bit(momentum: float, dtype: torch.dtype) -> None:
    model, other = network(dtype), network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum, weight_decay=0.01)
    lag = mt.gradient_lag(optimizer)
    plain = torch.optim.SGD(other.parameters(), 0.05, momentum, weight_decay=0.01)
    waiting: list[Tensor] = []
    for step in range(8):
        lagged(optimizer, model, range(step, step + 1))
        gradients = torch.autograd.grad(loss_of(other, step), list(other.parameters()))
        for each, gradient in zip(other.parameters(), waiting, strict=False):
            each.grad = gradient
        if waiting:
            plain.step()
        waiting = list(gradients)
        assert all(torch.equal(one, each) for one, each in zip(model.parameters(), other.parameters(), strict=True))
        assert lag.is_pending
    lag.flush()
    for each, gradient in zip(other.parameters(), waiting, strict=True):
        each.grad = gradient
    plain.step()
    assert all(torch.equal(one, each) for one, each in zip(model.parameters(), other.parameters(), strict=True))
    assert not lag.is_pending
    before = [each.detach().clone() for each in model.parameters()]
    lag.flush()
    assert all(torch.equal(one, each) for one, each in zip(before, model.parameters(), strict=True))


def test_groups_that_are_added_later_follow_the_schedule() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), 1.0)
    rates = mt.schedule_learning_rate(optimizer, Warmup(4))

    def step() -> list[float]:
        second(first(torch.ones(1, 2))).sum().backward()
        optimizer.step()
        return [group["lr"] for group in optimizer.param_groups]

    step()
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
    assert step() == [0.5, 0.25]
    state = rates.state_dict()
    assert step() == [0.75, 0.375]
    rates.load_state_dict(state, [])
    assert step() == [0.75, 0.375]
    # A checkpoint of before leaves the new group's own rate as it is.
    rates.load_state_dict({"position": 1.0, "bases": [2.0]}, [])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]


def test_the_first_lagged_step_advances_nothing() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    mt.gradient_lag(optimizer)
    rates = mt.schedule_learning_rate(optimizer, Warmup(4))
    average = mt.moving_average(optimizer, model, 0.5)
    before = [each.detach().clone() for each in model.parameters()]
    lagged(optimizer, model, range(1))
    assert all(torch.equal(one, each) for one, each in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert rates.position == 0
    lagged(optimizer, model, range(1, 3))
    assert rates.position == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert {float(each["step"]) for each in optimizer.state.values()} == {2.0}
    now = [each.detach().clone() for each in model.parameters()]
    with average.applied():
        assert not torch.equal(next(model.parameters()), now[0])
    assert all(torch.equal(one, each) for one, each in zip(now, model.parameters(), strict=True))


def test_an_average_has_statistics_of_its_own_that_keep_what_is_done_to_them() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = mt.moving_average(optimizer, model, 0.75)
    want = norm.running_mean.clone()
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((5, 3), float(step)) + torch.arange(5.0)[:, None]).square().sum().backward()
        optimizer.step()
        want += 0.25 * (norm.running_mean - want)
    now = norm.running_mean.clone()
    with average.applied():
        torch.testing.assert_close(norm.running_mean, want)
        norm.running_mean += 1
    assert torch.equal(norm.running_mean, now)
    with average.applied():
        torch.testing.assert_close(norm.running_mean, want + 1)


def test_a_lagged_state_goes_on_to_the_bit() -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network(seed=seed)
        optimizer = mt.LAMB(mt.parameter_groups(model), 0.01)
        mt.gradient_lag(optimizer)
        mt.mixed_precision(optimizer, "fp16", scale=LossScale(scale=64.0, patience=3))
        mt.moving_average(optimizer, model, 0.9)
        mt.schedule_learning_rate(optimizer, Warmup(9))
        mt.clip_gradients(optimizer, 0.5)
        return model, optimizer

    model, optimizer = made(0)
    lagged(optimizer, model, range(4))
    values, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    lagged(optimizer, model, range(4, 9))
    again, other = made(5)
    again.load_state_dict(values)
    other.load_state_dict(state)
    lagged(other, again, range(4, 9))
    assert all(torch.equal(one, each) for one, each in zip(model.parameters(), again.parameters(), strict=True))
    plain = mt.LAMB(mt.parameter_groups(network()), 0.01)
    mt.clip_gradients(plain, 1.0)
    with pytest.raises(ArgumentError, match=r"the state has a stage '.*', which this optimizer lacks"):
        plain.load_state_dict(state)


def test_lag_and_a_grad_scaler() -> None:
    """A step with an overflow applies the waiting gradient and drops only its own."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 1.0)
    assert scaled_and_lagged(optimizer, weight, math.inf) == [0.0, 1.0, 1.0, 5.0, 13.0]


def test_lag_refuses() -> None:
    with pytest.raises(ArgumentError, match="gradient_lag: steps=2: want 0 or 1"):
        mt.gradient_lag(torch.optim.SGD(weights(), 0.1), 2)
    with pytest.raises(ArgumentError, match="optimizer is a str"):
        mt.gradient_lag("sgd")  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(weights(), 0.1)
    mt.gradient_lag(optimizer)
    with pytest.raises(UnsupportedError, match=r"step.closure."):
        optimizer.step(lambda: 0.0)
    assert not mt.gradient_lag(torch.optim.SGD(weights(), 0.1), 0).is_pending


# ---- 16 bits ----


def test_a_loss_scale_rounds_nothing() -> None:
    ends = []
    for dtype in ("float32", "fp16"):
        model = network(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        precision = mt.mixed_precision(optimizer, dtype)
        for step in range(5):
            optimizer.zero_grad()
            precision.backward(loss_of(model, step))
            optimizer.step()
        assert precision.steps == 5
        ends.append([each.detach().clone() for each in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_bf16_keeps_weights_in_float32() -> None:
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    precision = mt.mixed_precision(optimizer)
    with precision.autocast():
        outputs = model(torch.ones(1, 1, 4, 4))
        assert outputs.dtype == torch.bfloat16
        loss = nn.functional.cross_entropy(outputs, torch.tensor([1]))
    assert loss.dtype == torch.float32
    precision.backward(loss)
    assert all(each.dtype == torch.float32 and each.grad is not None for each in model.parameters())
    optimizer.step()


def test_unscaled_fp16_loses_what_a_scale_keeps() -> None:
    """Half precision rounds gradients of 1e-9 to zero."""
    moved = []
    for scale in (1.0, 2.0**16):
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], 1e6)
        precision = mt.mixed_precision(optimizer, "fp16", scale=LossScale(scale=scale))
        loss = (weight.half() * torch.tensor(1e-4, dtype=torch.float16)).float().sum() * 1e-5
        precision.backward(loss)
        optimizer.step()
        moved.append(float((1 - weight.detach()).abs().max()))
    assert moved[0] == 0.0
    assert moved[1] > 5e-4


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    precision = mt.mixed_precision(optimizer, "bf16")
    precision.backward((weight * 2).sum())
    optimizer.step()
    optimizer.zero_grad()
    precision.backward((weight * float("nan")).sum())
    before = weight.detach().clone()
    with pytest.raises(StateError, match=r"step 1: the loss is nan on rank 0. The weights are those of the step"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_a_loss_scale_gives_up() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    precision = mt.mixed_precision(optimizer, "fp16", scale=LossScale(scale=2.0))

    def overflow() -> None:
        optimizer.zero_grad()
        precision.backward((weight * float("inf")).sum())
        optimizer.step()

    overflow()
    with pytest.raises(StateError, match=r"step 1: the loss is inf on rank 0, and the loss scale is 0.5 already"):
        overflow()
    assert precision.skipped == 2


def test_two_optimizers_leave_out_a_step_together() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizers = [torch.optim.SGD([first], 1.0), torch.optim.SGD([second], 1.0)]
    precision = mt.mixed_precision(optimizers, "fp16", scale=LossScale(scale=4.0))
    seen = []
    for factor in (1.0, math.inf, 2.0):
        for each in optimizers:
            each.zero_grad()
        precision.backward((first + second * factor).sum())  # only the gradient of `second` overflows
        for each in optimizers:
            each.step()
        seen.append((-first[0].item(), -second[0].item(), precision.scale))
    assert seen == [(1.0, 1.0, 4.0), (1.0, 1.0, 2.0), (2.0, 3.0, 2.0)]
    assert (precision.steps, precision.skipped) == (3, 1)


def test_mixed_precision_refuses() -> None:
    with pytest.raises(ArgumentError, match="want float32 weights"):
        mt.mixed_precision(torch.optim.SGD([nn.Parameter(torch.zeros(2).half())], 0.1))
    with pytest.raises(ArgumentError, match="dtype='fp8'"):
        mt.mixed_precision(torch.optim.SGD(weights(), 0.1), "fp8")
    with pytest.raises(ArgumentError, match="want a scale for 'fp16' only"):
        mt.mixed_precision(torch.optim.SGD(weights(), 0.1), "bf16", scale=LossScale())


# ---- the noise scale, on one rank ----


def test_noise_scale_of_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(30, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], 0.0)
    noise = mt.noise_scale(optimizer, every=2, warns=False)
    with pytest.raises(
        StateError, match=r"no finite noise scale yet .noise scale: 0 of at least 8 measurements; a longer run"
    ):
        noise.recommend_batch_size()
    with pytest.raises(AttributeError, match=r"NoiseWatch.advise is now NoiseWatch.recommend_batch_size: use the new"):
        noise.advise()  # type: ignore[attr-defined]  # a former name
    mean = torch.full((30,), 0.5, dtype=torch.float64)
    for _ in range(600):
        optimizer.zero_grad()
        for samples in (4, 12):
            data = mean + 2.0 * torch.randn(samples, 30, generator=generator, dtype=torch.float64)
            backward((weight * data).sum(dim=1).sum() / 16)
            noise.part(samples)
        optimizer.step()
    truth = 4.0 * 30 / (0.25 * 30)
    assert len(noise) == 300
    assert noise.batch == 16
    assert noise.value == pytest.approx(truth, rel=0.1)
    interval = noise.interval()
    assert interval.low < truth < interval.high
    assert "at batch 16" in noise.report()
    assert noise.recommend_batch_size(batches=[16, 32]).choices[1].batch == 32
    with pytest.raises(ArgumentError, match=r"not of every 2 steps: use noise_scale.every=1."):
        mt.adascale(optimizer, Constant(), noise, scale=2, batch=8)


def test_noise_scale_warns_once_of_a_batch_far_beyond_it() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], 0.0)
    noise = mt.noise_scale(optimizer, every=1)

    def train_on() -> None:
        for _ in range(40):
            optimizer.zero_grad()
            for _ in range(2):
                backward((weight * (1 + 0.5 * torch.randn(200, 8, generator=generator))).sum(dim=1).mean() / 2)
                noise.part(200)
            optimizer.step()

    with pytest.warns(UserWarning, match="convergence: batch: 400 samples a step with a noise scale of") as seen:
        train_on()
    assert len(seen) == 1
