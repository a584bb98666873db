"""Trial steps of a copy of a model, which show whether a parallelism works."""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from multiring.errors import MultiringError
from multiring.planner.parallelism import Axis, Parallelism, stages_of
from multiring.torch.parallelizing.anatomy import anatomy_of
from multiring.torch.parallelizing.held import whole
from multiring.torch.parallelizing.measuring import fork_random_numbers
from multiring.torch.parallelizing.model import ParallelModel
from multiring.torch.parallelizing.profiling import MeasuredProfile
from multiring.torch.parallelizing.staging import MiddleStage

_ALIKE = 1e-3  # relative to the norm of the gradient, and to the loss, because each parallelism adds in another order
_TOLD = 200  # characters of an error that are printed

Build = Callable[[nn.Module, Parallelism], ParallelModel]


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial of a parallelism.

    Attributes:
        failure: why the model does not run under it, or "".
        difference: how its loss or gradients differ from those of one process, or "".
    """

    failure: str = ""
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Alone:
    """The loss and gradients that one process computes for a sample.

    Attributes:
        loss: the loss.
        gradients: the gradients, by parameter name.
        is_random: whether a second run gives different results, which makes comparisons impossible.
    """

    loss: float
    gradients: dict[str, Tensor]
    is_random: bool


def alone(model: nn.Module, inputs: tuple[Tensor, ...]) -> Alone:
    """Return the loss and gradients of one process for `inputs`.

    The model is not changed.
    """
    found = []
    for seed in range(2):
        with fork_random_numbers():
            torch.manual_seed(seed)
            plain = copy.deepcopy(model)
            loss = probe(plain(*_fresh(inputs)), torch.empty(0))
            if loss.requires_grad:
                torch.autograd.backward([loss])
            found.append((float(loss.detach()), _gradients(plain)))
    (loss_1, gradients_1), (loss_2, gradients_2) = found
    is_random = _apart(loss_1, gradients_1, loss_2, gradients_2) != ""
    return Alone(loss_1, gradients_1, is_random)


def tried(
    model: nn.Module, inputs: tuple[Tensor, ...], parallelism: Parallelism, measured: MeasuredProfile, build: Build
) -> TrialOutcome:
    """Compare two steps of a copy of `model` under `parallelism` with one process.

    Every rank calls it.

    Args:
        model: the model, which is not changed.
        inputs: the batch of all ranks.
        parallelism: the parallelism to try.
        measured: the model's measurements.
        build: a function that makes a ParallelModel of a model.
    """
    try:
        truth = alone(model, inputs)
    except (TypeError, RuntimeError) as error:
        if "deepcopy" not in str(error) and "pickle" not in str(error):
            raise
        return TrialOutcome()  # the model cannot be copied, so nothing can be tried
    failure = difference = ""
    try:
        with fork_random_numbers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = copy.deepcopy(model)
            if parallelism.size(Axis.PIPELINE) > 1:
                found = _in_stages(trial, inputs, parallelism, measured)
            else:
                found = _on_ranks(build(trial, parallelism), inputs)
        if not truth.is_random:
            difference = _apart(truth.loss, truth.gradients, *found)
    except (MultiringError, dist.DistError):
        raise
    except Exception as error:  # noqa: BLE001 -- any error of a step rules out this parallelism
        failure = f"a trial step raised {type(error).__name__}: {_shortened(str(error))}"
    outcomes: list[TrialOutcome] = [TrialOutcome()] * dist.get_world_size()
    dist.all_gather_object(outcomes, TrialOutcome(failure, difference))
    return TrialOutcome(
        next((each.failure for each in outcomes if each.failure), ""),
        next((each.difference for each in outcomes if each.difference), ""),
    )


def probe(made: Any, _targets: Tensor) -> Tensor:
    """Return a loss for any outputs, in which each number has a different weight.

    It is a mean over samples.
    """
    losses = []
    for each in tree_leaves(made):
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
            value = torch.view_as_real(each) if each.is_complex() else each
            if not value.dim():
                losses.append(value)
            elif value.numel():
                flat = value.reshape(value.shape[0], -1).double()
                weights = torch.cos(torch.arange(flat.shape[1], dtype=torch.float64))
                losses.append((flat * weights + flat.square() / 2).mean())
    return torch.stack([each.double() for each in losses]).sum() if losses else torch.zeros((), dtype=torch.float64)


def _on_ranks(model: ParallelModel, inputs: tuple[Tensor, ...]) -> tuple[float, dict[str, Tensor]]:
    given = model.share(*_fresh(inputs))
    found: tuple[float, dict[str, Tensor]] = (0.0, {})
    for turn in range(2):  # the second step runs on the state that the first leaves behind
        loss = model.step(tuple(each.clone() for each in given), given[0], probe)
        if not turn:
            own = _gradients(model.plain_module)
            found = float(loss), {name: whole(each) for name, each in own.items()}
        model.module.zero_grad(set_to_none=True)
    return found


def _in_stages(
    model: nn.Module, inputs: tuple[Tensor, ...], parallelism: Parallelism, measured: MeasuredProfile
) -> tuple[float, dict[str, Tensor]]:
    """Run all stages of a pipeline in this process, so that a failing stage leaves no rank waiting."""
    parts = [each.module for each in anatomy_of(model, parallelism.ranks).parts]
    cuts = stages_of(measured.profile.units, parallelism.size(Axis.PIPELINE))
    stages = [
        MiddleStage(nn.Sequential(*(parts[index] for index in cut)), receives=cut[0] > 0)  # type: ignore[arg-type] # no part of a sequence is None
        for cut in cuts
    ]
    count = parallelism.data_ranks * parallelism.microbatches
    total = 0.0
    for given in zip(*(each.chunk(count) for each in _fresh(inputs)), strict=True):
        ends: list[tuple[Tensor, Tensor]] = []
        passed = given
        for stage in stages:
            made = stage(*passed)
            received = made.detach().requires_grad_(made.is_floating_point())
            ends.append((made, received))
            passed = (received,)
        loss = probe(ends[-1][1], received) / count
        torch.autograd.backward([loss])
        total += float(loss.detach())
        for made, received in reversed(ends):
            if made.requires_grad and received.grad is not None:
                torch.autograd.backward([made], [received.grad])
    for number, stage in enumerate(stages):
        if not any(each.grad is not None for each in stage.parameters()):
            raise ValueError(f"stage {number} of the pipeline has no parameter that is trained")
    return total, _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.detach().clone() for name, each in model.named_parameters() if each.grad is not None}


def _apart(loss: float, gradients: dict[str, Tensor], loss_here: float, gradients_here: dict[str, Tensor]) -> str:
    """Return how the second loss and gradients differ from the first, or "" if they agree.

    If the first loss or gradients are not finite, the result is "" too.
    """
    squares = [float(each.double().square().sum()) for each in gradients.values()]
    norm = math.sqrt(sum(squares))
    if not math.isfinite(loss) or not math.isfinite(norm):
        return ""
    if abs(loss - loss_here) > _ALIKE * max(1e-6, abs(loss)):
        return f"the loss of the sample is {loss_here:.6g}, but {loss:.6g} on one rank"
    for name, each in gradients.items():
        here = gradients_here.get(name, torch.zeros_like(each))
        apart = float((here.to_dense() - each.to_dense()).double().norm())
        if not apart <= _ALIKE * max(1e-9, norm):
            return f"the gradient of {name} differs from one rank's by {apart / norm:.2g} of the gradient's norm"
    return ""


def _fresh(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = tree_map(lambda each: each.clone(), inputs)
    return found


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TOLD else f"{line[:_TOLD]}..."
