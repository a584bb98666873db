"""Muon, whose orthogonalisation is divided among the ranks.

All ranks have the same momentum. Each rank orthogonalises some of the matrices, and an allgather of 16-bit numbers
gives all ranks all results. So a step costs each rank only its share of the arithmetic.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon/; the learning rate "match_rms_adamw" of Liu et al., "Muon is scalable for LLM
training", 2025, arXiv 2502.16982.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiring._arguments import (
    is_of,
    require_choice,
    require_flag,
    require_number,
    require_numbers,
    require_whole,
    shown,
)
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.interop import described
from multiring.torch.optim.division import Divided, SharedResult, exchanged, owners_of
from multiring.torch.parallelizing.held import is_dtensor
from multiring.torch.step.gradients import buffers_of, evaluated, number, with_gradients

_RATES = ("original", "match_rms_adamw")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewtonSchulz:
    """The iteration X <- a X + b (X X^T) X + c (X X^T)^2 X, which orthogonalises X.

    Args:
        coefficients: a, b and c.
        steps: number of iterations, below 100.
        eps: lower limit of the norm by which the matrix is divided first.
        precision: data type of the iterations and of the result that ranks exchange.
    """

    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    eps: float = 1e-7
    precision: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require_number("eps", self.eps)
        require_whole("steps", self.steps, 0, 99)
        require_numbers("coefficients", self.coefficients, 3, least=-math.inf)
        if not is_of(self.precision, torch.dtype) or not self.precision.is_floating_point:
            raise ArgumentError(f"precision={shown(self.precision)}: want a type of floats, such as torch.bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """A parameter of a step, seen as a matrix."""

    parameter: Tensor
    gradient: Tensor
    group: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; the columns cover all dimensions except the first."""
        rows = self.parameter.size(0)
        return rows, self.parameter.numel() // max(1, rows)


class Muon(Divided):
    """torch.optim.Muon, with the work of a step divided among the ranks.

    On one rank, its results are bit-identical to torch's. The gradients have to be the same on all ranks, as a
    DistributedOptimizer makes them. Optimize biases, norms, embeddings and the last layer with another optimizer, for
    example AdamW.
    """

    def __init__(  # noqa: PLR0913 -- torch's Muon has as many
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str | None = None,
        iteration: NewtonSchulz | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Optimize `params`.

        In tensors of more than two dimensions, all dimensions but the first count as columns.

        Args:
            params: tensors, pairs of names and tensors, or groups with options of their own.
            lr: the learning rate.
            weight_decay: decoupled weight decay.
            momentum: the momentum factor, from 0 to below 1.
            nesterov: whether to use Nesterov momentum.
            adjust_lr_fn: the factor of the learning rate: "original" means sqrt(max(1, rows/columns)), and
                "match_rms_adamw" means 0.2 sqrt(max(rows, columns)).
            iteration: the iteration that orthogonalises the matrices; torch's by default.
            process_set: the ranks that divide the work.

        Raises:
            ArgumentError: a number is out of range, or a parameter has fewer than two dimensions or complex numbers.
            UnsupportedError: a parameter is a DTensor.
        """
        lr, weight_decay = require_number("lr", lr), require_number("weight_decay", weight_decay)
        momentum, nesterov = require_number("momentum", momentum, below=1.0), require_flag("nesterov", nesterov)
        if iteration is not None and not isinstance(iteration, NewtonSchulz):
            raise ArgumentError(f"iteration={shown(iteration)}: want a NewtonSchulz, or None")
        chosen = iteration or NewtonSchulz()
        require_choice("adjust_lr_fn", "original" if adjust_lr_fn is None else adjust_lr_fn, _RATES)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": chosen.coefficients,
            "eps": chosen.eps,
            "ns_steps": chosen.steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._precision = chosen.precision
        super().__init__(params, defaults, process_set)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps."""
        return {**super().__getstate__(), "_precision": self._precision}

    def _require(self, parameter: Tensor) -> None:
        """Raise an error if `parameter` is no matrix of real numbers, or if this rank has only a part of it."""
        if is_dtensor(parameter):
            raise UnsupportedError(
                f"Muon of a parameter, {described(parameter)}, of which each rank has a part: Muon orthogonalises "
                "whole matrices; want a data or pipeline axis, or another optimizer"
            )
        if parameter.dim() < 2 or parameter.is_complex():
            raise ArgumentError(
                f"Muon of a parameter, {described(parameter)}: want matrices or filters of real numbers; give biases, "
                "norms and complex ones to another optimizer, such as AdamW"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the current gradients.

        Every rank calls it, with the same gradients.
        """
        loss = evaluated(closure)
        found = [(group, *with_gradients("Muon", group)) for group in self.param_groups]
        for group, parameters, gradients in found:
            self._accumulate(group, parameters, gradients)
        matrices = [
            _Matrix(parameter, gradient, group)
            for group, parameters, gradients in found
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        done = iter(self._orthogonalised(matrices))
        for group, parameters, _ in found:
            rate = number(group["lr"])
            for parameter in parameters:
                update = next(done)
                parameter.mul_(1 - rate * group["weight_decay"])
                shape = update.shape
                parameter.add_(update.view(parameter.shape), alpha=-_adjusted(rate, group["adjust_lr_fn"], shape))
        return loss

    def _accumulate(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Add the gradients of all matrices to the momentum; every rank does the same work."""
        if not parameters:  # for example the first step with gradient lag
            return
        buffers = buffers_of(self, parameters, "momentum_buffer")
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])

    def _orthogonalised(self, matrices: list[_Matrix]) -> list[Tensor]:
        """Return the update of each matrix, of shape (rows, columns), computed by this or another rank."""
        if not matrices:  # the same on all ranks, because their gradients are alike
            return []
        group = self._ranks()
        if group is None:
            return [self._iterated(each) for each in matrices]
        # With sides s <= l, an iteration computes two products of s * s * l multiplications and one of s * s * s.
        costs = [min(each.shape) ** 2 * (2 * max(each.shape) + min(each.shape)) for each in matrices]
        owners = owners_of(costs, [0.0] * group.size)
        own = {i: self._iterated(each) for i, each in enumerate(matrices) if owners[i] == group.rank}
        places = [
            SharedResult(owner, each.parameter.numel(), each.parameter.device)
            for owner, each in zip(owners, matrices, strict=True)
        ]
        found = exchanged(group, own, places, self._precision, what="Muon")
        return [flat.view(each.shape) for flat, each in zip(found, matrices, strict=True)]

    def _iterated(self, matrix: _Matrix) -> Tensor:
        group = matrix.group
        update = self.state[matrix.parameter]["momentum_buffer"]
        if group["nesterov"]:  # Nesterov's look-ahead
            update = matrix.gradient.lerp(update, group["momentum"])
        return orthogonalised(
            update.reshape(matrix.shape),
            self._precision,
            group["ns_coefficients"],
            steps=group["ns_steps"],
            eps=group["eps"],
        )


def orthogonalised(
    matrix: Tensor, precision: torch.dtype, coefficients: tuple[float, float, float], *, steps: int, eps: float
) -> Tensor:
    """Return U V^T approximately, given U S V^T, by Newton-Schulz iterations.

    `matrix` is U S V^T. The result has the same shape, and the data type `precision`.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(precision, copy=True)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _adjusted(rate: float, rule: str | None, shape: Sequence[int]) -> float:
    rows, columns = shape
    if rule == "match_rms_adamw":
        return rate * 0.2 * math.sqrt(max(rows, columns))
    return rate * math.sqrt(max(1.0, rows / columns))
