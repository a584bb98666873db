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

import numpy as np
import torch
from torch import Tensor

from multiring._frontend.errors import internal_errors
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring._runtime import Group, is_initialized
from multiring.convergence.arguments import require_choice, require_number
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.gradients.device_buckets import on_host
from multiring.torch.interop import described
from multiring.torch.parallelizing.held import held_by, is_dtensor
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
        require_number("steps", self.steps, below=100)


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


class Muon(torch.optim.Optimizer):
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
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            require_number(name, value)
        require_number("momentum", momentum, below=1.0)
        chosen = iteration or NewtonSchulz()
        require_choice("adjust_lr_fn", adjust_lr_fn or "original", _RATES)
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
        super().__init__(params, defaults)
        self._precision = chosen.precision
        self._process_set = process_set
        self._members: Group | None = None  # `_group` is its twin; rejoining a job replaces both
        self._group: Group | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which have to be matrices of real numbers."""
        super().add_param_group(param_group)
        for each in self.param_groups[-1]["params"]:
            if is_dtensor(each):
                raise UnsupportedError(
                    f"Muon of a parameter, {described(each)}, of which each rank has a part: Muon orthogonalises whole "
                    "matrices; want a data or pipeline axis, or another optimizer"
                )
            if each.dim() < 2 or each.is_complex():
                del self.param_groups[-1]
                raise ArgumentError(
                    f"Muon of a parameter, {described(each)}: want matrices or filters of real numbers; give biases, "
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
        if group is None or group.size == 1:
            return [self._iterated(each) for each in matrices]
        owners = owners_of([each.shape for each in matrices], group.size)
        counts = [each.parameter.numel() for each in matrices]
        own = [i for i, owner in enumerate(owners) if owner == group.rank]
        # Matrices of the host are gathered from the host; those of devices, from their first device.
        devices = [each.parameter.device for each in matrices]
        device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
        flat = torch.empty(sum(counts[i] for i in own), dtype=self._precision, device=device)
        for i, place in zip(own, torch.split(flat, [counts[i] for i in own]), strict=True):
            place.view(matrices[i].shape).copy_(self._iterated(matrices[i]))
        with internal_errors("Muon"):
            # The data type does not matter to the allgather, so it sends bytes.
            whole = np.asarray(group.all_gather(on_host([flat])[0].view(torch.uint8).numpy()))
        order = sorted(range(len(matrices)), key=lambda i: (owners[i], i))  # the order of the gathered results
        gathered = torch.from_numpy(whole)
        if device.type != "cpu":
            gathered = gathered.pin_memory()
        numbers = torch.split(gathered.view(self._precision), [counts[i] for i in order])
        found = dict(zip(order, numbers, strict=True))
        return [found[i].to(devices[i], non_blocking=True).view(each.shape) for i, each in enumerate(matrices)]

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

    def _ranks(self) -> Group | None:
        held = held_by(self)
        if not is_initialized() or not self._process_set.included() or (held is not None and held.stages is not None):
            return None  # the ranks of a pipeline have different matrices
        members = members_of(self._process_set).group
        if self._members is not members:
            self._members, self._group = members, members.twin()
        return self._group


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


def owners_of(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[int]:
    """Return for each matrix the rank that orthogonalises it.

    The costliest matrix is assigned first, each to the rank with the smallest load so far.

    Args:
        shapes: (rows, columns) of each matrix.
        ranks: number of ranks.
    """
    # With sides s <= l, an iteration computes two products of s * s * l multiplications and one product of s * s * s.
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    load, owners = [0] * ranks, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], i)):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


def _adjusted(rate: float, rule: str | None, shape: Sequence[int]) -> float:
    rows, columns = shape
    if rule == "match_rms_adamw":
        return rate * 0.2 * math.sqrt(max(rows, columns))
    return rate * math.sqrt(max(1.0, rows / columns))
