"""Gradients of a rank's loss, weighted by how many of the global batch's samples it has.

The loss of a global batch is its samples' mean: of the ranks' means, each weighted by its rank's number of samples. So
are its gradients. Where ranks have equally many, every weight is 1, and nothing is done.

Parameters' gradients are weighted as backward reaches them, before they add up: so batches of unlike weights may
accumulate. A SyncBatchNorm, whose backward mixes all ranks' gradients, has to mix weighted ones; what it passes on goes
without the weight again, as the layers below it expect.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multiring.data import Share
from multiring.errors import UnsupportedError
from multiring.torch.nn.sync_batch_norm import SyncBatchNorm


class Weighing:
    """Weights the gradients of an optimizer's parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, reduction: str) -> None:
        """Weigh nothing yet.

        Args:
            model: whose layers may be SyncBatchNorm.
            optimizer: its parameters, those it is given later too.
            reduction: "mean" or "sum", of the samples' losses.
        """
        self._optimizer = optimizer
        self._mixing = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
        self._reduction = reduction
        self._hooks: list[Any] = []

    def factor_of(self, share: Share) -> float:
        """Return what a rank's loss counts for, in the ranks' average or sum, if it has this share of the batch."""
        return share.weight if self._reduction == "mean" else float(share.samples > 0)

    def set(self, share: Share | None) -> None:
        """Weigh gradients by `share` from now on; None for all alike.

        Raises:
            UnsupportedError: on every rank: one of them has no samples, and would normalise others' a second time.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        vars(self._optimizer)["share_of_batch"] = share
        if share is None:
            return
        if not share.least and self._mixing:
            raise UnsupportedError(
                f"a batch of {share.total} samples for {share.ranks} ranks, with SyncBatchNorm: a rank without samples "
                "has none to normalise; want drop_last=True, or batches of at least as many samples as ranks"
            )
        factor = self.factor_of(share)
        if factor == 1.0:
            return
        for layer in self._mixing:
            self._hooks.append(layer.register_forward_pre_hook(partial(_weigh_input, 1.0 / factor)))
            self._hooks.append(layer.register_forward_hook(partial(_weigh_output, factor)))
        # Of those layers' own parameters, gradients are weighted already.
        weighted = {id(parameter) for layer in self._mixing for parameter in layer.parameters()}
        for param_group in self._optimizer.param_groups:
            for parameter in param_group["params"]:
                if parameter.requires_grad and id(parameter) not in weighted:
                    self._hooks.append(parameter.register_hook(partial(scaled, factor)))


def scaled(factor: float, tensor: Tensor) -> Tensor:
    """Return `tensor` times `factor`: zeros for 0, whatever it holds."""
    return tensor * factor if factor else torch.zeros_like(tensor)


def _weigh_input(factor: float, _layer: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    return (_with_gradient(arguments[0], factor),)


def _weigh_output(factor: float, _layer: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
    return _with_gradient(output, factor)


def _with_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return `tensor`, whose gradient is scaled on its way back to it."""
    if not tensor.requires_grad:
        return tensor
    seen = tensor.view_as(tensor)
    seen.register_hook(partial(scaled, factor))  # type: ignore[no-untyped-call] # torch's own
    return seen
