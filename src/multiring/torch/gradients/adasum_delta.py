"""Adasum of what each rank's own step changed: the ranks step with their own gradients, and combine the changes.

    start                 the parameters, the same on all ranks
    delta = step - start  of this rank alone, with whatever optimizer
    parameters = start + adasum(all ranks' deltas)

Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, arXiv 2006.02924, section
4.1: combined after the optimizer, not before, Adasum goes with Adam and momentum as well.
"""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multiring.frontend.adasum_reduction import start_adasum
from multiring.frontend.errors import internal_errors
from multiring.frontend.first_steps import FirstSteps
from multiring.runtime import Group
from multiring.torch.interop import array_of, in_one_piece

_WHAT = "DistributedOptimizer"


class DeltaReducer:
    """The changes of some parameters by a rank's own steps, which the ranks of a group combine step by step."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], group: Group, compressor: Any) -> None:
        """Take note of `parameters`; local.

        Args:
            parameters: names and leaf tensors.
            group: of this object alone.
            compressor: changes their form on the way.
        """
        self._parameters = [parameter for _, parameter in parameters]
        self._first_steps = FirstSteps(_WHAT, group, [name for name, _ in parameters], self._values)
        self._told = self._first_steps.told_nothing()
        self._group = group
        self._compressor = compressor
        self._starts: list[Tensor] = []
        self._hidden: list[tuple[Tensor, Tensor]] = []  # gradients that this step is not to use, and their parameters
        self._step: FrameType | None = None  # the call of `step` that is going on

    @property
    def sent_bytes(self) -> int:
        """How much one step gives to collectives, uncompressed."""
        return sum(parameter.nbytes for parameter in self._parameters)

    def before_step(self, optimizer: torch.optim.Optimizer, call: FrameType, *, unscales: bool) -> None:
        """Take note of where the parameters are.

        Args:
            optimizer: theirs; a loss scaler has left `found_inf` and perhaps `grad_scale` there.
            call: the call of `step`; a class whose `step` calls that of its base comes here twice.
            unscales: whether the optimizer's own step does not know what a scaler left.
        """
        if _is_running(self._step):
            return
        self._step = call
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            # One rank's overflow makes all ranks leave the step out.
            everywhere = np.array([float(found_inf)])
            with internal_errors(_WHAT):
                self._group.all_reduce(everywhere, "max")
            found_inf.fill_(float(everywhere[0]))
            if unscales:
                self._unscale(getattr(optimizer, "grad_scale", None), leaves_out=bool(everywhere[0]))
                # Optimizers that do not know what these are refuse them.
                vars(optimizer).update(grad_scale=None, found_inf=None)
        self._starts = [parameter.detach().clone() for parameter in self._parameters]
        if self._first_steps.wants:
            gradients = [parameter.grad for parameter in self._parameters]
            self._first_steps.see(
                array_of(in_one_piece(each)) for each in gradients if each is not None and each.layout is torch.strided
            )
            self._told = self._first_steps.told()

    def _values(self) -> list[NDArray[Any]]:
        return [array_of(in_one_piece(each)) for each in self._starts or self._parameters]

    def after_step(self, call: FrameType) -> None:
        """Combine what the ranks' steps have changed since `before_step`, and let the parameters be that."""
        if call is not self._step:
            return
        self._step = None
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        with torch.no_grad():
            pairs = list(zip(self._parameters, self._starts, strict=True))
            deltas = [parameter - start for parameter, start in pairs]
            self._combine(deltas, trains=True)
            for (parameter, start), delta in zip(pairs, deltas, strict=True):
                parameter.copy_(start + delta)
        self._starts = []
        self._first_steps.step()

    def contribute_neutrally(self) -> None:
        """Take part in the other ranks' steps without changes of this rank's own, until no rank trains any more."""
        trains = bool(self._parameters)
        while trains:
            trains = self._combine([torch.zeros_like(parameter) for parameter in self._parameters], trains=False)

    def _unscale(self, scale: Tensor | None, *, leaves_out: bool) -> None:
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if leaves_out:
                self._hidden.append((parameter, gradient))
                parameter.grad = None
            elif scale is not None:
                gradient.div_(scale)

    def _combine(self, deltas: list[Tensor], *, trains: bool) -> bool:
        """Combine every rank's `deltas` into all of them; return whether any rank trains."""
        told, self._told = self._told, self._first_steps.told_nothing()
        flags = np.array([trains, told.any()], np.uint8)
        with internal_errors(_WHAT):
            self._group.all_reduce(flags, "max")
            if not flags[0]:
                return False
            if flags[1]:
                self._first_steps.meet(told)
            pairs = [self._compressor.compress(delta) for delta in deltas]
            sent = [compressed.contiguous() for compressed, _ in pairs]
            for dtype in sorted({each.dtype for each in sent}, key=str):
                start_adasum(self._group, [array_of(each) for each in sent if each.dtype == dtype]).wait()
        for delta, each, (_, context) in zip(deltas, sent, pairs, strict=True):
            delta.copy_(self._compressor.decompress(each, context))
        return True


def _is_running(call: FrameType | None) -> bool:
    """Return whether `call` has not returned; one that raised has, though nobody was told."""
    frame: FrameType | None = sys._getframe() if call is not None else None  # noqa: SLF001 -- documented in sys
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None
