"""Make an optimizer of Keras 3 combine the gradients of all ranks, on any of Keras' backends. Imports no backend.

The optimizer object stays the same, and only its class changes. Its state and all references to it therefore stay
valid. Gradients are combined where Keras clips them: once per update, after the gradients of several batches were
accumulated. A LossScaleOptimizer checks gradients for infinities before that. Its gradients are combined before the
check, so that all ranks see the same values.

Under `distribute`, ranks may have different numbers of samples of a batch. Each rank's loss or gradients are then
weighted by its share of the batch before they are accumulated or combined (see `multiring._frontend.keras_steps`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from multiring._arguments import require_flag, require_whole
from multiring._frontend.keras_steps import current_step
from multiring.errors import ArgumentError, UnsupportedError

Reduce = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]  # gradients and variables -> gradients of all ranks

_KERAS = "keras.optimizers"  # where Keras finds its own optimizers by name


class _GradientReduction:
    """The state of an optimizer's reduction.

    It is one object because Keras would track a list of variables that is an attribute of the optimizer.
    """

    def __init__(self, reduce: Reduce, *, sums_passes: bool) -> None:
        self.reduce = reduce
        self.sums_passes = sums_passes  # whether accumulated gradients are summed rather than averaged
        self.variables: Sequence[Any] = ()  # the variables whose gradients are being applied
        self.has_reduced = False  # whether the current call of `apply` has reduced the gradients


class _Weighting:
    """Weights the loss, or the gradients, of a training step by this rank's share of the batch."""

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss by the optimizer's loss scale and by this rank's share of the batch."""
        found = super().scale_loss(loss)  # type: ignore[misc]
        step = current_step()
        return found if step is None or not step.scales_loss else step.weighted(found)


def _weighted(gradients: Sequence[Any]) -> Sequence[Any]:
    step = current_step()
    if step is None or step.scales_loss:
        return gradients
    return [None if each is None else step.weighted(each) for each in gradients]


class _Distributed(_Weighting):
    """The base class that is put in front of an optimizer's own class."""

    gradient_reduction: _GradientReduction
    gradient_accumulation_steps: int | None

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Apply gradients, weighted by this rank's share of the batch.

        Raises:
            UnsupportedError: the optimizer's own `apply` does not clip gradients, so they were not combined.
        """
        self.gradient_reduction.has_reduced = False
        super().apply(_weighted(grads), trainable_variables)  # type: ignore[misc]
        if len(grads) and not self.gradient_accumulation_steps and not self.gradient_reduction.has_reduced:
            raise UnsupportedError(
                f"{type(self).__name__} applies gradients without Keras' _clip_gradients, so they were not combined "
                "over the ranks: call super().apply in it, or combine them with multiring.keras.allreduce yourself"
            )

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        self.gradient_reduction.variables = trainable_variables
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        self.gradient_reduction.has_reduced = True
        found = list(self.gradient_reduction.reduce(grads, self.gradient_reduction.variables))
        if self.gradient_reduction.sums_passes and self.gradient_accumulation_steps:
            found = [None if each is None else each * self.gradient_accumulation_steps for each in found]
        return super()._clip_gradients(found)  # type: ignore[misc]


class _DistributedOuter(_Weighting):
    """The base class for an optimizer that wraps others. It combines gradients before the wrapper handles them."""

    gradient_reduction: _GradientReduction

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Combine the gradients, and pass them to the optimizer's own `apply`."""
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)  # type: ignore[attr-defined]
        found = self.gradient_reduction.reduce(list(_weighted(list(grads))), variables)
        super().apply(found, trainable_variables)  # type: ignore[misc]


_INNER = "_multiring_is_inner"  # marks the optimizers inside a distributed optimizer, which get combined gradients


def is_distributed(optimizer: Any) -> bool:
    """Return whether `distributed` has returned this optimizer."""
    return isinstance(optimizer, _Distributed | _DistributedOuter)


def adopt_in_steps(base: Any) -> None:
    """Make any optimizer distributed when a training step applies it.

    Args:
        base: the Keras class that all Keras optimizers inherit from.
    """
    owner = next(each for each in base.__mro__ if "apply" in vars(each))
    plain = owner.apply
    if hasattr(plain, "multiring"):
        return

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        step = current_step()
        if step is None or is_distributed(self) or getattr(self, _INNER, False):
            return plain(self, grads, trainable_variables)
        step.adopt(self)
        return self.apply(grads, trainable_variables)

    apply.multiring = True  # type: ignore[attr-defined]
    owner.apply = functools.wraps(plain)(apply)


def distributed(optimizer: Any, reduce: Reduce, *, passes: int = 1, averages_passes: bool = False) -> Any:
    """Return `optimizer`, changed so that `reduce` combines its gradients.

    Args:
        optimizer: an optimizer of keras.optimizers, built or not.
        reduce: takes gradients and variables, and returns the gradients of all ranks; it leaves None as None.
        passes: the number of batches whose gradients are accumulated for one update.
        averages_passes: whether accumulated gradients are averaged rather than summed.

    Raises:
        ArgumentError: `optimizer` is not an optimizer of Keras 3, is distributed already, or is built so that it can
            no longer start to accumulate gradients; or `passes` is below 1.
    """
    kind = type(optimizer)
    if is_distributed(optimizer):
        raise ArgumentError(f"this {kind.__name__} is already distributed: pass the original optimizer of Keras")
    needed = ("_backend_apply_gradients", "_clip_gradients", "apply", "get_config")
    missing = [each for each in needed if not hasattr(optimizer, each)]
    if missing:
        raise ArgumentError(
            f"optimizer is a {kind.__module__}.{kind.__name__}, without {missing[0]}: want one of keras.optimizers, of "
            "Keras 3"
        )
    averages_passes = require_flag("average_aggregated_gradients", averages_passes)
    passes = require_whole("backward_passes_per_step", passes, 1, wanted="1 or more, a whole number")
    inner = _inner(optimizer)
    for each in [one for one in inner if not _inner(one)] or [optimizer]:
        if passes > 1:
            _accumulate(each, passes)
    for each in inner:
        setattr(each, _INNER, True)
    base: Any = _DistributedOuter if inner else _Distributed
    # A saved model names Keras' own class, so that it can be loaded without multiring.
    module = _KERAS if kind.__module__.startswith("keras.src.optimizers") else kind.__module__
    names: dict[str, Any] = {"__module__": module, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # An attribute of the class, so that optimizers made by its from_config combine gradients too, as in Horovod.
    names["gradient_reduction"] = _GradientReduction(reduce, sums_passes=passes > 1 and not averages_passes)
    optimizer.__class__ = type(kind.__name__, (base, kind), names)
    return optimizer


def _inner(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a LossScaleOptimizer or a MultiOptimizer, at any depth."""
    direct = [optimizer.inner_optimizer] if hasattr(optimizer, "inner_optimizer") else []
    direct += list(getattr(optimizer, "optimizers", ()))
    return [one for each in direct for one in (each, *_inner(each))]


def _accumulate(optimizer: Any, passes: int) -> None:
    if optimizer.built:
        raise ArgumentError(
            f"backward_passes_per_step={passes} of an optimizer that has been used: want a new one, or one made with "
            f"gradient_accumulation_steps={passes}"
        )
    optimizer.gradient_accumulation_steps = passes
