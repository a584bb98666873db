"""Gradients of a rank's loss, weighted by how many of the global batch's samples it has.

The loss of a global batch is its samples' mean: of the ranks' means, each weighted by its rank's number of samples. So
are its gradients. Where ranks have equally many, every weight is 1, and nothing is done.

Parameters' gradients are weighted as backward reaches them, before they add up: so batches of unlike weights may
accumulate. A SyncBatchNorm, whose backward mixes all ranks' gradients, has to mix weighted ones; what it passes on goes
without the weight again, as the layers below it expect.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from multiring.data import Share
from multiring.errors import UnsupportedError
from multiring.torch.gradients.distributed import Distributed
from multiring.torch.nn.sync_batch_norm import SyncBatchNorm


class Weighing:
    """Weights gradients by the batches of one loader.

    Those of all optimizers that `distribute` was given with the same model, or for the same data: several may train on
    one loader's batches, as Muon and AdamW do, or a generator and a discriminator. A gradient is of the batch that was
    handed out last, whichever of their loaders did.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, reduction: str, source: object = None
    ) -> None:
        """Weigh nothing yet.

        Args:
            model: whose layers may be SyncBatchNorm.
            optimizer: its parameters, those it is given later too.
            reduction: "mean" or "sum", of the samples' losses.
            source: what the loader reads; accumulated steps of all optimizers that train on it end with its passes.
        """
        self._model, self._optimizer = model, optimizer
        self._reduction, self._source = reduction, source
        self.handed_out = 0  # batches of this pass
        earlier = vars(optimizer).get(_KEY)
        if earlier is not None:
            _batches.forget(earlier)
        vars(optimizer)[_KEY] = self  # as long as the optimizer lives, whose loader may be another call's
        _batches.add(self)

    @property
    def parameters(self) -> Iterator[Tensor]:
        """The optimizer's parameters, and then the model's, which may have others."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @property
    def model_parameters(self) -> Iterator[Tensor]:
        """The model's parameters, of which other optimizers may have some."""
        yield from self._model.parameters()

    @property
    def mixing(self) -> list[nn.Module]:
        """The layers whose backward mixes all ranks' gradients."""
        return [layer for layer in self._model.modules() if isinstance(layer, SyncBatchNorm)]

    @property
    def optimizer(self) -> Distributed:
        """Whose gradients are weighted."""
        return cast("Distributed", self._optimizer)

    def factor_of(self, share: Share) -> float:
        """Return what a rank's loss counts for, in the ranks' average or sum, if it has this share of the batch."""
        return share.weight if self._reduction == "mean" else float(share.samples > 0)

    def set(self, share: Share | None) -> None:
        """Weigh gradients by `share` from now on; None where the pass is over.

        Raises:
            UnsupportedError: on every rank: one of them has no samples, and would normalise others' a second time; or
                two loaders hand out batches by turns, of unlike parts, for one backward.
        """
        if share is None:
            self.handed_out = 0
            _batches.end(self)
            return
        self.handed_out += 1
        _batches.hand_out(self, share)

    @property
    def accumulates(self) -> bool:
        """Whether several backwards make a step of an optimizer that trains on this loader's batches."""
        return any(each.optimizer.accumulates for each in self.companions())

    def reduce_early(self, *, early: bool) -> None:
        """Say whether the batch is the last of its pass, with which accumulated steps end."""
        for each in self.companions():
            each.optimizer.reduce_early(early=early)

    def companions(self) -> "list[Weighing]":
        """Return those that train on this loader's batches: of the same model, or on the same data."""
        return [
            each
            for each in _batches.weighings()
            if each is self or each._model is self._model or (self._source is not None and each._source is self._source)  # noqa: SLF001 -- of this class
        ]


@dataclass(slots=True)
class _Last:
    """The batch that was handed out last."""

    weighing: Weighing
    share: Share
    backwards: int


class _Batches:
    """The batches that loaders of this process have handed out, and the hooks that weight their gradients."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Weighing]] = []
        self._open: dict[int, tuple[weakref.ref[Weighing], Share]] = {}  # the last batch of each pass, newest last
        self._last: _Last | None = None
        self._hooks: dict[int, list[Any]] = {}  # by the `id` of a parameter or layer

    def weighings(self) -> list[Weighing]:
        """Return those that there are."""
        self._known = [each for each in self._known if each() is not None]
        return [found for each in self._known if (found := each()) is not None]

    def add(self, weighing: Weighing) -> None:
        """Know one more."""
        self._known.append(weakref.ref(weighing))

    def forget(self, weighing: Weighing) -> None:
        """Take out one whose optimizer has another now."""
        self.end(weighing)
        self._known = [each for each in self._known if each() is not weighing]

    def hand_out(self, weighing: Weighing, share: Share) -> None:
        """Weigh gradients of what trains on it by `share`, which `weighing` has handed out."""
        companions = weighing.companions()
        last, backwards = self._last, sum(each.optimizer.backwards for each in companions)
        if last is not None and last.weighing is not weighing and last.weighing in companions:
            self._refuse_two(last, weighing, share, backwards)
        self._last = _Last(weighing, share, backwards)
        self._open.pop(id(weighing), None)
        self._open[id(weighing)] = (weakref.ref(weighing), share)
        self._weigh(companions, share)

    def end(self, weighing: Weighing) -> None:
        """Weigh by the batch of a pass around this one, if there is one: its backward may be to come."""
        self._open.pop(id(weighing), None)
        self._open = {key: each for key, each in self._open.items() if each[0]() is not None}
        if self._last is not None and self._last.weighing is weighing:
            self._last = None
        companions = weighing.companions()
        around = [share for found, share in self._open.values() if found() in companions]
        self._weigh(companions, around[-1] if around else None)

    @staticmethod
    def _refuse_two(last: _Last, weighing: Weighing, share: Share, backwards: int) -> None:
        one, other = last.weighing.factor_of(last.share), weighing.factor_of(share)
        if one != other and last.backwards == backwards and last.weighing.handed_out > 1:
            raise UnsupportedError(
                f"two loaders of distribute hand out batches for one backward, of {last.share.total} and {share.total} "
                f"samples for {share.ranks} ranks: a gradient is weighted by one of them, and this rank's parts are "
                "unlike. Want batches that all ranks divide evenly (drop_last=True), or a backward for each"
            )

    def _weigh(self, weighings: list[Weighing], share: Share | None) -> None:
        for each in weighings:
            each.optimizer.take_batch(share)
            for one in (*each.mixing, *each.parameters, *each.model_parameters):
                for hook in self._hooks.pop(id(one), ()):
                    hook.remove()
        if share is not None:
            self._weigh_parameters(weighings, share, self._weigh_layers(weighings, share))

    def _weigh_layers(self, weighings: list[Weighing], share: Share) -> set[int]:
        """Weigh what SyncBatchNorms mix; return the `id` of their parameters, whose gradients are weighted then."""
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
        # An optimizer's own parameters first: it says how their losses are combined.
        for name in ("parameters", "model_parameters"):
            for each in weighings:
                factor = each.factor_of(share)
                for parameter in getattr(each, name):
                    if parameter.requires_grad and id(parameter) not in seen:
                        seen.add(id(parameter))
                        if factor != 1.0:
                            self._hooks[id(parameter)] = [parameter.register_hook(partial(scaled, factor))]


_KEY = "_multiring_weighing"
_batches = _Batches()


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
