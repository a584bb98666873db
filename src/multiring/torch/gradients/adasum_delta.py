"""Adasum of parameter changes: each rank steps with its own gradients, and the ranks combine the changes.

    start                 the parameters, the same on all ranks
    delta = step - start  this rank's own change, by any optimizer
    parameters = start + adasum(all ranks' deltas)

Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, arXiv 2006.02924, section
4.1: because Adasum is applied after the optimizer and not before it, it also works with Adam and momentum.
"""

import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multiring._frontend.adasum_reduction import start_adasum
from multiring._frontend.errors import internal_errors
from multiring._frontend.first_steps import FirstSteps
from multiring._runtime import Group
from multiring._runtime.group.declining import declining
from multiring.torch.gradients.device_buckets import HostCopies, StagedOrder, on_host
from multiring.torch.interop import array_of, in_one_piece

_WHAT = "DistributedOptimizer"


class DeltaReducer:
    """Combine, step by step, the changes that each rank's own steps make to the parameters."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], group: Group, compressor: Any) -> None:
        """Prepare to combine the changes of `parameters`; local, without communication.

        Args:
            parameters: names and leaf tensors.
            group: the ranks, in a group that only this object uses.
            compressor: compresses the changes before they travel, and decompresses the result.
        """
        self._parameters = [parameter for _, parameter in parameters]
        self._first_steps = FirstSteps(_WHAT, group, [name for name, _ in parameters], self._values)
        self._told = self._first_steps.told_nothing()
        self._group = group
        self._compressor = compressor
        self._order: StagedOrder | None = None
        self._starts: list[Tensor] = []
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters, and their gradients that this step must not use
        self._step: FrameType | None = None  # the frame of the running call of `step`

    @property
    def sent_bytes(self) -> int:
        """The bytes that one step passes to collectives, before compression."""
        return sum(parameter.nbytes for parameter in self._parameters)

    def before_step(self, optimizer: torch.optim.Optimizer, call: FrameType, *, unscales: bool) -> None:
        """Save the parameters' values before the step.

        Args:
            optimizer: the parameters' optimizer; a loss scaler may have set `found_inf` and `grad_scale` on it.
            call: the frame of the call of `step`. If a class's `step` calls the `step` of its base class, this method
                is called twice.
            unscales: whether this method must unscale the gradients, because the optimizer's own step cannot.
        """
        if _is_running(self._step):
            return
        self._step = call
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            # If the gradients of one rank overflow, all ranks skip the step.
            with declining(self._group):
                everywhere = np.array([float(on_host([found_inf])[0])])
            with internal_errors(_WHAT):
                self._group.all_reduce(everywhere, "max")
            found_inf.fill_(float(everywhere[0]))
            if unscales:
                self._unscale(getattr(optimizer, "grad_scale", None), leaves_out=bool(everywhere[0]))
                # An optimizer without support for a loss scaler rejects these attributes.
                vars(optimizer).update(grad_scale=None, found_inf=None)
        self._starts = [parameter.detach().clone() for parameter in self._parameters]
        if self._first_steps.wants:
            gradients = [parameter.grad for parameter in self._parameters]
            self._first_steps.see(
                array_of(in_one_piece(each))
                for each in on_host([each for each in gradients if each is not None and each.layout is torch.strided])
            )
            self._told = self._first_steps.told()

    def _values(self) -> list[NDArray[Any]]:
        return [array_of(in_one_piece(each)) for each in on_host(self._starts or self._parameters)]

    def after_step(self, call: FrameType) -> None:
        """Combine the ranks' changes since `before_step`, and apply the result to the parameters."""
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
        """Contribute changes of zero to the other ranks' steps, until every rank has stopped training."""
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
                gradient.div_(scale.to(gradient.device))

    def _combine(self, deltas: list[Tensor], *, trains: bool) -> bool:
        """Replace `deltas` by the combination of all ranks' deltas; return whether any rank trains."""
        told, self._told = self._told, self._first_steps.told_nothing()
        flags = np.array([trains, told.any()], np.uint8)
        with internal_errors(_WHAT):
            self._group.all_reduce(flags, "max")
            if not flags[0]:
                return False
            if flags[1]:
                self._first_steps.meet(told)
            with declining(self._group):
                copies = HostCopies(deltas, self._group)
            if copies.copied:
                self._order = self._order or StagedOrder(self._group)
                combine = partial(self._combine_on_host, copies.places)
                self._order.post(copies.copied, lambda: combine, lambda: None).result()
            else:
                self._combine_on_host(copies.places)
            copies.write_back()
        return True

    @torch.no_grad()
    def _combine_on_host(self, deltas: list[Tensor]) -> None:
        pairs = [self._compressor.compress(delta) for delta in deltas]
        sent = [compressed.contiguous() for compressed, _ in pairs]
        for dtype in sorted({each.dtype for each in sent}, key=str):
            start_adasum(self._group, [array_of(each) for each in sent if each.dtype == dtype]).wait()
        for delta, each, (_, context) in zip(deltas, sent, pairs, strict=True):
            delta.copy_(self._compressor.decompress(each, context))


def _is_running(call: FrameType | None) -> bool:
    """Return whether the frame `call` is still running. A call that raised an error is no longer running."""
    frame: FrameType | None = sys._getframe() if call is not None else None  # noqa: SLF001 -- documented in sys
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None
