"""Weights of a rank's gradients, by its number of samples in the global batch.

The loss of a global batch is the mean over its samples. That is the mean of the ranks' losses, weighted by each
rank's number of samples. The same holds for gradients. If all ranks have equally many samples, every weight is 1, and
no hook is installed.

Hooks weight the parameters' gradients during backward, before the gradients accumulate. Batches with different weights
may therefore accumulate. The backward of a SyncBatchNorm mixes all ranks' gradients, so the gradient that reaches
it must already be weighted. The gradient that it passes to the layers below is divided by the weight again, because
their own hooks will weight it.
"""

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from multiring._frontend.errors import LoopOrderError
from multiring._frontend.lifecycle import rank
from multiring.data import Share
from multiring.errors import UnsupportedError
from multiring.torch.gradients.distributed import Distributed
from multiring.torch.nn.sync_batch_norm import SyncBatchNorm

_log = logging.getLogger("multiring")
_AHEAD = (
    "distribute weights the gradients of a backward by the newest batch that the loader has handed out, and the ranks' "
    "parts of a batch differ, here of {share.total} samples for {share.ranks} ranks. Run the backward of a batch "
    "before you take the next batch: a loop that takes batches ahead, such as a prefetcher or list(loader), gets wrong "
    "weights. Or use batches that divide evenly among the ranks (drop_last=True)"
)


class Weighing:
    """Weights gradients by the batches of one loader.

    It weights gradients of all optimizers that `distribute` got with the same model or the same data. Several
    optimizers may train on one loader's batches, for example Muon and AdamW, or a generator's and a discriminator's. A
    gradient belongs to the batch that any of their loaders handed out last.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, reduction: str, source: object = None
    ) -> None:
        """Register this optimizer and its loader; no gradient is weighted yet.

        Args:
            model: the model, which may contain SyncBatchNorm layers.
            optimizer: the optimizer of the weighted parameters. Parameters that are added later are weighted too.
            reduction: "mean" or "sum": how the loss combines the samples' losses.
            source: the loader's data. At the end of a pass, accumulated steps end for all optimizers with the same
                data.
        """
        self._model, self._optimizer = model, optimizer
        self._reduction, self._source = reduction, source
        self.handed_out = 0  # the number of batches of the current pass
        self.is_ahead = False  # the program took two batches of the current pass before its first backward
        self.was_uneven = False  # a batch of the current pass had an uneven share
        earlier = vars(optimizer).get(_KEY)
        if earlier is not None:
            _batches.forget(earlier)
        vars(optimizer)[_KEY] = self  # stored on the optimizer, which may outlive this call's loader
        _batches.add(self)

    @property
    def parameters(self) -> Iterator[Tensor]:
        """The optimizer's parameters."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @property
    def model_parameters(self) -> Iterator[Tensor]:
        """The model's parameters, some of which may belong to other optimizers."""
        yield from self._model.parameters()

    @property
    def is_training(self) -> bool:
        """Whether the model is in the mode of training."""
        return self._model.training

    @property
    def mixing(self) -> list[nn.Module]:
        """The layers whose backward mixes all ranks' gradients."""
        return [layer for layer in self._model.modules() if isinstance(layer, SyncBatchNorm)]

    @property
    def optimizer(self) -> Distributed:
        """The optimizer whose gradients are weighted."""
        return cast("Distributed", self._optimizer)

    def factor_of(self, share: Share) -> float:
        """Return the weight of a rank's loss in the average or sum, given its share."""
        return share.weight if self._reduction == "mean" else float(share.samples > 0)

    def is_uneven(self, share: Share) -> bool:
        """Return whether the weights of the ranks' losses differ; the same on all ranks."""
        return share.least * share.ranks != share.total if self._reduction == "mean" else not share.least

    def begin(self) -> None:
        """Begin a pass; the former one may have been left before its end."""
        self.handed_out, self.is_ahead, self.was_uneven = 0, False, False

    def set(self, share: Share | None) -> None:
        """Weight gradients by `share` from now on; None ends the pass.

        If a pass with an uneven share ends before the backward of its last batch, a backward that follows raises a
        LoopOrderError.

        Raises:
            UnsupportedError: a rank has no samples for a SyncBatchNorm, or two loaders hand out batches of different
                shares for one backward. Every rank raises it.
        """
        if share is None:
            _batches.end(self)
            self.begin()
            return
        self.handed_out += 1
        self.was_uneven = self.was_uneven or self.is_uneven(share)
        _batches.hand_out(self, share)

    @property
    def accumulates(self) -> bool:
        """Whether an optimizer of this loader accumulates several backwards per step."""
        return any(each.optimizer.accumulates for each in self.companions())

    def reduce_early(self, *, early: bool) -> None:
        """Set whether the batch is the last of its pass, which ends accumulated steps."""
        for each in self.companions():
            each.optimizer.reduce_early(early=early)

    def companions(self) -> "list[Weighing]":
        """Return the Weighing objects of the same model or data, this one included."""
        return [
            each
            for each in _batches.weighings()
            if each is self or each._model is self._model or (self._source is not None and each._source is self._source)  # noqa: SLF001 -- an attribute of the same class
        ]


@dataclass(slots=True)
class _Last:
    """The batch that was handed out last."""

    weighing: Weighing
    share: Share
    backwards: int


class _Batches:
    """The batches that this process's loaders have handed out, and the hooks that weight gradients."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Weighing]] = []
        self._open: dict[int, tuple[weakref.ref[Weighing], Share]] = {}  # each pass's newest batch, by age of the pass
        self._last: _Last | None = None
        self._has_warned = False
        self._hooks: dict[int, list[Any]] = {}  # keyed by the `id` of a parameter or layer

    def weighings(self) -> list[Weighing]:
        """Return the Weighing objects that still exist."""
        self._known = [each for each in self._known if each() is not None]
        return [found for each in self._known if (found := each()) is not None]

    def add(self, weighing: Weighing) -> None:
        """Register a Weighing object."""
        self._known.append(weakref.ref(weighing))

    def forget(self, weighing: Weighing) -> None:
        """Remove a Weighing object, because its optimizer has a new one."""
        self.end(weighing)
        self._known = [each for each in self._known if each() is not weighing]

    def hand_out(self, weighing: Weighing, share: Share) -> None:
        """Weight the gradients of all companions of `weighing` by `share`, its newest batch."""
        companions = weighing.companions()
        last, backwards = self._last, sum(each.optimizer.backwards for each in companions)
        if last is not None and last.weighing is not weighing and last.weighing in companions:
            self._refuse_two(last, weighing, share, backwards)
        # A pass without gradients is an evaluation: no backward follows its batches.
        if last is not None and last.weighing is weighing and last.backwards == backwards and torch.is_grad_enabled():
            weighing.is_ahead = weighing.is_ahead or weighing.handed_out == 2
        if weighing.is_ahead and weighing.was_uneven and weighing.is_training and not self._has_warned:
            self._has_warned = True
            if rank() == 0:
                _log.warning(
                    "two batches were taken before the first backward of a pass. %s", _AHEAD.format(share=share)
                )
        self._last = _Last(weighing, share, backwards)
        self._open.pop(id(weighing), None)
        self._open[id(weighing)] = (weakref.ref(weighing), share)
        self._weigh(companions, share)

    def end(self, weighing: Weighing) -> None:
        """Stop weighting by the batches of `weighing`.

        This pass may have run inside another pass. The gradients then get the weight of the outer pass's batch, because
        its backward may still follow.
        """
        self._open.pop(id(weighing), None)
        self._open = {key: each for key, each in self._open.items() if each[0]() is not None}
        companions = weighing.companions()
        around = [share for found, share in self._open.values() if found() in companions]
        self._weigh(companions, around[-1] if around else None)
        last = self._last
        if last is None or last.weighing is not weighing:
            return
        self._last = None
        is_used = last.backwards != sum(each.optimizer.backwards for each in companions)
        if not around and (
            weighing.was_uneven if weighing.is_ahead else not is_used and weighing.is_uneven(last.share)
        ):
            for parameter in {id(one): one for each in companions for one in each.parameters}.values():
                if parameter.requires_grad:
                    refusal: Any = parameter.register_hook(partial(_refuse_late, last.share))  # type: ignore[no-untyped-call] # torch does not annotate it
                    self._hooks[id(parameter)] = [refusal]

    @staticmethod
    def _refuse_two(last: _Last, weighing: Weighing, share: Share, backwards: int) -> None:
        one, other = last.weighing.factor_of(last.share), weighing.factor_of(share)
        if one != other and last.backwards == backwards and last.weighing.handed_out > 1:
            raise UnsupportedError(
                f"two loaders of distribute hand out batches for one backward, of {last.share.total} and {share.total} "
                f"samples for {share.ranks} ranks. A gradient can have the weight of one batch only, but this rank's "
                "parts of the two batches differ: use batches that divide evenly among the ranks (drop_last=True), "
                "or one backward per batch"
            )

    def _weigh(self, weighings: list[Weighing], share: Share | None) -> None:
        for each in weighings:
            each.optimizer.take_batch(share)
        if not self._hooks and (share is None or _is_even(weighings, share)):
            return  # the usual case: the walk through all layers and parameters would take as long as a small layer
        for each in weighings:
            for one in (*each.mixing, *each.parameters, *each.model_parameters):
                for hook in self._hooks.pop(id(one), ()):
                    hook.remove()
        if share is not None:
            self._weigh_parameters(weighings, share, self._weigh_layers(weighings, share))

    def _weigh_layers(self, weighings: list[Weighing], share: Share) -> set[int]:
        """Weight the gradients of SyncBatchNorm layers; return the `id`s of the layers' parameters."""
        mixing = {id(layer): (layer, each) for each in weighings for layer in each.mixing}
        if not share.least and mixing:
            raise UnsupportedError(
                f"a batch of {share.total} samples for {share.ranks} ranks, with SyncBatchNorm: a rank without samples "
                "has none to normalise; want drop_last=True, or batches of at least as many samples as ranks"
            )
        for layer, each in mixing.values():
            factor = each.factor_of(share)
            if factor != 1.0:
                self._hooks[id(layer)] = [
                    layer.register_forward_pre_hook(partial(_weigh_input, 1.0 / factor)),
                    layer.register_forward_hook(partial(_weigh_output, factor)),
                ]
        return {id(parameter) for layer, _ in mixing.values() for parameter in layer.parameters()}

    def _weigh_parameters(self, weighings: list[Weighing], share: Share, seen: set[int]) -> None:
        # An optimizer comes first for its own parameters, because it defines how their losses are combined.
        for name in ("parameters", "model_parameters"):
            for each in weighings:
                factor = each.factor_of(share)
                for parameter in getattr(each, name):
                    if parameter.requires_grad and id(parameter) not in seen:
                        seen.add(id(parameter))
                        if factor != 1.0:
                            self._hooks[id(parameter)] = [parameter.register_hook(partial(scaled, factor))]


def _refuse_late(share: Share, _gradient: Tensor) -> Tensor:
    raise LoopOrderError(
        f"a backward after the end of the pass, without one of its last batch. {_AHEAD.format(share=share)}"
    )


_KEY = "_multiring_weighing"
_batches = _Batches()


def _is_even(weighings: list[Weighing], share: Share) -> bool:
    """Return whether all weights are 1, and no rank lacks samples."""
    return share.least > 0 and all(each.factor_of(share) == 1.0 for each in weighings)


def scaled(factor: float, tensor: Tensor) -> Tensor:
    """Return `tensor` times `factor`.

    A factor of 0 gives zeros even for NaN and infinity.
    """
    return tensor * factor if factor else torch.zeros_like(tensor)


def _weigh_input(factor: float, _layer: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    return (_with_gradient(arguments[0], factor),)


def _weigh_output(factor: float, _layer: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
    return _with_gradient(output, factor)


def _with_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return a view of `tensor` whose gradient is scaled by `factor` in backward."""
    if not tensor.requires_grad:
        return tensor
    seen = tensor.view_as(tensor)
    seen.register_hook(partial(scaled, factor))  # type: ignore[no-untyped-call] # torch does not annotate it
    return seen
