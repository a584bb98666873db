"""create_multi_node_optimizer: make an optimizer use all ranks' gradients."""

from typing import Any

import chainermn

from multiring.chainer.communicator import Communicator
from multiring.chainer.gradients import form_of, give
from multiring.errors import ArgumentError

__all__ = ["create_multi_node_optimizer"]


def create_multi_node_optimizer(
    actual_optimizer: Any,
    communicator: Any,
    double_buffering: bool = False,  # noqa: FBT001, FBT002 -- ChainerMN's
    zero_fill: bool = True,  # noqa: FBT001, FBT002 -- ChainerMN's
) -> Any:
    """Return an optimizer that updates with the average of all ranks' gradients.

    The result computes updates with `actual_optimizer`.

    As in ChainerMN, the first `update` of a model broadcasts the parameters of rank 0 and makes no step. The same
    happens in the first `update` after more parameters got values.

    Args:
        actual_optimizer: an optimizer of chainer.optimizers.
        communicator: a communicator from `create_communicator`.
        double_buffering: whether a step uses the averages of the previous step. The ranks then average gradients while
            they compute the next gradients. ChainerMN supports this for NCCL only.
        zero_fill: whether a missing gradient counts as zero.

    Raises:
        ArgumentError: `double_buffering` is set, and the communicator is of another library.
    """
    if not double_buffering:
        return chainermn.create_multi_node_optimizer(actual_optimizer, communicator, zero_fill=zero_fill)
    if not isinstance(communicator, Communicator):
        raise ArgumentError(
            f"create_multi_node_optimizer(double_buffering=True) with a {type(communicator).__name__}: want a "
            "communicator from multiring.chainer.create_communicator"
        )
    return _DoubleBuffered(actual_optimizer, communicator, zero_fill=zero_fill)


class _DoubleBuffered:
    """An optimizer that applies averages one step late. Other attributes are those of the wrapped optimizer."""

    _own = frozenset({"actual_optimizer", "communicator", "_zero_fill", "_form", "_gradients"})

    def __init__(self, actual_optimizer: Any, communicator: Communicator, *, zero_fill: bool) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self._zero_fill = zero_fill
        self._form: Any = None
        self._gradients: Any = None

    def setup(self, link: Any) -> "_DoubleBuffered":
        """Set up the wrapped optimizer for `link`, and return self."""
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        """Start to average the gradients of `lossfun`, and make a step with the averages of the previous call.

        Without `lossfun`, the current gradients are averaged.
        """
        target = self.target
        if lossfun is not None:
            loss = lossfun(*args, **kwds)
            if getattr(self, "_use_cleargrads", True):
                target.cleargrads()
            else:
                target.zerograds()
            loss.backward(loss_scale=self.actual_optimizer._loss_scale)  # noqa: SLF001 -- as ChainerMN's does
        if form_of(target) != self._form:
            self._begin(target)
            return
        gradients = self._gradients
        before = gradients.finish()
        late = None if before is None else [None if each is None else each.copy() for each in before]
        gradients.start(target, zero_fill=self._zero_fill)
        if late is not None:
            give(target, late)
            self.actual_optimizer.update(None, *args, **kwds)

    def _begin(self, target: Any) -> None:
        if self._gradients is not None:
            self._gradients.finish()
        self.communicator.bcast_data(target)
        self._form = form_of(target)
        self._gradients = self.communicator.gradients_of(target)

    def __getattr__(self, name: str) -> Any:
        if name == "actual_optimizer":  # `__init__` has not set the attribute yet
            raise AttributeError(name)
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_optimizer, name, value)
