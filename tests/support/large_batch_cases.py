"""All large-batch optimizers and switches in one table, and trainings with them.

A training gives the same result on any number of ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from tests.support.plain import backward, network, samples
from torch import Tensor, nn

import multiring.torch as mt
from multiring._gradients.loss_scale import LossScale
from multiring.convergence import Constant, Cosine, Warmup

BATCH = 12  # 1, 2, 3 and 4 ranks divide it
Trained = list[torch.optim.Optimizer]
Make = Callable[[nn.Module], Trained]


def _groups(model: nn.Module) -> Any:
    return mt.parameter_groups(model, weight_decay=0.01)


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(model), 0.1, **{"momentum": 0.9, **options})


def _muon(model: nn.Module) -> Trained:
    first, second = mt.parameter_groups(model)
    matrices = mt.Muon(first["params"], 0.02, iteration=mt.NewtonSchulz(precision=torch.float64))
    return [matrices, torch.optim.AdamW(second["params"], 0.01)]


def _shampoo(model: nn.Module) -> Trained:
    # The default frequency of ten would leave few steps with bases.
    return [mt.Shampoo(_groups(model), 0.02, eigendecomposition=mt.Eigendecomposition(frequency=4, block=6))]


def _with(make: Make, *switches: Callable[[torch.optim.Optimizer, nn.Module], Any]) -> Make:
    def made(model: nn.Module) -> Trained:
        optimizers = make(model)
        for optimizer in optimizers:
            for switch in switches:
                switch(optimizer, model)
        return optimizers

    return made


def _lag(optimizer: torch.optim.Optimizer, _model: nn.Module) -> None:
    mt.gradient_lag(optimizer)


def _clip(optimizer: torch.optim.Optimizer, _model: nn.Module) -> None:
    mt.clip_gradients(optimizer, 0.3)


def _scale(optimizer: torch.optim.Optimizer, _model: nn.Module) -> None:
    mt.mixed_precision(optimizer, "fp16", scale=LossScale(scale=64.0, patience=3))


def _schedule(optimizer: torch.optim.Optimizer, _model: nn.Module) -> None:
    mt.schedule_learning_rate(optimizer, Warmup(5) * Cosine(30))


def _average(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    mt.moving_average(optimizer, model, 0.9)


CASES: dict[str, Make] = {
    "LARS": lambda model: [mt.LARS(_groups(model), 0.5, trust_coefficient=0.1)],
    "LARS nesterov timm": lambda model: [
        mt.LARS(_groups(model), 0.5, trust_coefficient=0.1, nesterov=True, form="timm")
    ],
    "LARS optax": lambda model: [mt.LARS(_groups(model), 0.5, trust_coefficient=0.1, form="optax")],
    "LAMB": lambda model: [mt.LAMB(_groups(model), 0.02)],
    "LAMB pre-normalised": _with(
        lambda model: [mt.LAMB(_groups(model), 0.02, bias_correction=False, clip=1.0, limits=(0.1, 5.0))], _clip
    ),
    "LARC clip": lambda model: [mt.LARC(_sgd(model))],
    "LARC scale": lambda model: [mt.LARC(_sgd(model), mode="scale", trust_coefficient=0.1)],
    "LARC Adam": lambda model: [mt.LARC(torch.optim.Adam(_groups(model), 0.02))],
    "LARC Adam before": lambda model: [mt.LARC(torch.optim.AdamW(_groups(model), 0.02), order="before_moments")],
    "Muon": _muon,
    "Shampoo": _shampoo,
    "lag": _with(lambda model: [_sgd(model)], _lag),
    "lag, everything": _with(lambda model: [mt.LAMB(_groups(model), 0.02)], _average, _schedule, _lag, _clip, _scale),
    "LARC, everything": _with(lambda model: [mt.LARC(_sgd(model))], _clip, _scale, _schedule, _average, _lag),
    "Muon, everything": _with(_muon, _lag, _clip, _scale, _schedule, _average),
    "Shampoo, everything": _with(_shampoo, _lag, _clip, _scale, _schedule, _average),
    "clip, schedule, average": _with(lambda model: [_sgd(model, nesterov=True)], _clip, _schedule, _average),
    "loss scale": _with(lambda model: [_sgd(model)], _scale),
}


def scale_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the loss scale of an optimizer of the table."""
    stage = vars(optimizer).get("_multiring_stages")
    found = None if stage is None else stage.find("unscale")
    return 1.0 if found is None else float(found.whole.scale)


def trained(name: str, rank: int, ranks: int, *, passes: int = 1, steps: int = 20) -> list[Tensor]:
    """Train by the case `name`; return the weights, and their average if any.

    Args:
        name: the name of the case.
        rank: this rank.
        ranks: the number of ranks that share each batch of `BATCH` samples; 1 for plain training without a job.
        passes: the backward passes per step.
        steps: the number of steps.
    """
    model = network()
    optimizers = CASES[name](model)
    if ranks > 1:
        for number, optimizer in enumerate(optimizers):
            own = {id(each) for group in optimizer.param_groups for each in group["params"]}
            named = [(key, each) for key, each in model.named_parameters() if id(each) in own]
            optimizers[number] = mt.DistributedOptimizer(optimizer, named, backward_passes_per_step=passes)
    for step in range(steps):
        images, labels = samples(step, BATCH)
        images, labels = images[rank::ranks], labels[rank::ranks]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(passes):
            loss = nn.functional.cross_entropy(model(images[part::passes]), labels[part::passes])
            backward(loss * scale_of(optimizers[0]) / passes)
        for optimizer in optimizers:
            optimizer.step()
    found = [each.detach().clone() for each in model.parameters()]
    kept = vars(optimizers[0]).get("_multiring_stages")
    average = None if kept is None else kept.find("average")
    return found if average is None else [*found, *average.state_dict()["averages"]]


def trained_adaptively(rank: int, ranks: int, parts: int, *, lag: int) -> list[Tensor]:
    """Train with AdaScale; return the weights and the position of the schedule.

    AdaScale measures the gradients of `parts` ranks, or of `parts` backward passes of one rank. Its gain depends only
    on the number of parts.
    """
    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.5)
    if ranks > 1:
        optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())
    mt.gradient_lag(optimizer, lag)
    noise = mt.noise_scale(optimizer, samples=BATCH // parts, every=1, warns=False)
    rates = mt.adascale(optimizer, Constant(), noise, scale=4, batch=3)
    for step in range(20):
        images, labels = samples(step, BATCH)
        optimizer.zero_grad()
        for part in [rank] if ranks > 1 else range(parts):
            loss = nn.functional.cross_entropy(model(images[part::parts]), labels[part::parts])
            backward(loss / (1 if ranks > 1 else parts))
            if ranks == 1:
                noise.part(BATCH // parts)
        optimizer.step()
    assert 1 < rates.gain < 4
    return [*(each.detach().clone() for each in model.parameters()), torch.tensor(rates.position)]


def scaled_and_lagged(optimizer: torch.optim.Optimizer, weight: Tensor, overflow: float) -> list[float]:
    """Train by SGD at rate 1 with a GradScaler; return the distance after each step.

    The loss of the second of the five steps is multiplied by `overflow`.
    """
    mt.gradient_lag(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    seen = []
    for factor in (1.0, overflow, 4.0, 8.0, 16.0):
        optimizer.zero_grad()
        backward(scaler.scale((weight * factor).sum()))
        scaler.step(optimizer)
        scaler.update()
        seen.append(-weight[0].item())
    return seen
