"""Callbacks for `fit`, with Horovod's names and signatures."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from multiring._arguments import require_flag, require_number, require_whole
from multiring._frontend.evaluation import mean
from multiring._frontend.first_rank import on_first_rank
from multiring._frontend.lifecycle import rank, size
from multiring._frontend.object_collectives import broadcast_object
from multiring.errors import ArgumentError
from multiring.keras.values import broadcast_variables, is_shared, raise_failed, settled

_log = logging.getLogger("multiring")


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Broadcasts the variables of rank `root_rank`'s model and optimizer before the first step.

    If the first step builds the model, the variables are broadcast after that step. On JAX the callback also makes
    `fit` raise in the step in which a collective has failed.

    Args:
        root_rank: the rank whose variables are broadcast.
        device: not used.
        local_variables: variables that are not broadcast.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        del device
        self.root_rank = require_whole("root_rank", root_rank)
        self.broadcast_done = False
        self._local = {id(variable) for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Exclude `var` from the broadcast."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables if the model is built."""
        del logs
        self.broadcast_done = False
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Raise the error of a failed step.

        Broadcast the variables if `on_train_begin` could not.
        """
        del batch
        raise_failed(logs)
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        settled(self.model)
        optimizer = self.model.optimizer
        # An optimizer that is not built will start with the same variables on all ranks.
        variables = [*self.model.variables, *(optimizer.variables if optimizer.built else ())]
        broadcast_variables([each for each in variables if id(each) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Averages the metrics of an epoch over the ranks.

    List it before callbacks that use the metrics.
    """

    def __init__(self, device: str = "") -> None:
        """Create the callback; `device` is not used."""
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the metrics in `logs` by their means over the ranks."""
        del epoch
        if logs:
            logs |= mean({name: float(logs[name]) for name in sorted(logs)})


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Sets the learning rate to `initial_lr` times a multiplier, in a range of epochs.

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: a number, or a function that takes an epoch and returns a number.
        start_epoch: the first epoch of the range, counted from 0.
        end_epoch: the first epoch after the range; None for no end.
        staircase: whether the rate changes once per epoch rather than once per batch.
        momentum_correction: no effect, because Keras 3 compiles the momentum into the step. A warning says so.
        steps_per_epoch: the number of batches in an epoch. It is needed if `staircase` is False. By default `fit`
            determines it.

    Raises:
        ArgumentError: an argument is no number, or out of range.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._momentum_correction = require_flag("momentum_correction", momentum_correction)
        # An error during `fit` would come on the ranks one after the other, and only after an epoch or more.
        self.initial_lr = require_number("initial_lr", initial_lr)
        self.start_epoch = require_number("start_epoch", start_epoch)
        self.end_epoch = None if end_epoch is None else require_number("end_epoch", end_epoch)
        self.staircase = require_flag("staircase", staircase) or not callable(multiplier)
        self.steps_per_epoch = None if steps_per_epoch is None else require_whole("steps_per_epoch", steps_per_epoch, 1)
        self.multiplier = multiplier if callable(multiplier) else _constant(require_number("multiplier", multiplier))
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the number of steps per epoch; warn if `momentum_correction` has no effect.

        Raises:
            ArgumentError: the number of steps is needed, and `fit` does not know it.
        """
        del logs
        momentum: Any = getattr(self.model.optimizer, "momentum", 0)
        if self._momentum_correction and momentum and rank() == 0:
            _log.warning(
                "momentum_correction has no effect: Keras 3 compiles the momentum, %g, into the step; pass "
                "momentum_correction=False",
                self.model.optimizer.momentum,
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ArgumentError(
                    "steps_per_epoch=None: fit does not know how many steps an epoch has; pass the number"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the learning rate for the epoch."""
        del logs
        self._epoch = epoch
        if self.staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate for the batch."""
        del logs
        if not self.staircase:
            self._set(self._epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the learning rate to the metrics."""
        del epoch
        if logs is not None:
            settled(self.model)
            logs["lr"] = float(np.asarray(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    def _set(self, epoch: float) -> None:
        if epoch >= self.start_epoch and (self.end_epoch is None or epoch < self.end_epoch):
            settled(self.model)
            self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)


def _constant(number: float) -> Callable[[float], float]:
    return lambda _epoch: number


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate batch by batch in the first epochs.

    The rate rises from `initial_lr` / ranks to `initial_lr`. Pass one rank's learning rate times the number of ranks as
    `initial_lr`. Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, arXiv
    1706.02677.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        warmup_epochs = require_number("warmup_epochs", warmup_epochs, above=True)

        def multiplier(epoch: float) -> float:
            # Compute the rate for the end of the batch, so that the last batch of the warm-up has the full rate.
            reached = epoch + 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (reached * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the end of the warm-up if `verbose` is set."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == int(self.end_epoch) - 1 and self.verbose and rank() == 0:
            _log.warning("epoch %d: finished gradual learning rate warmup to %g", epoch + 1, self.initial_lr)


class OnFirstRank(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Calls another callback on rank 0 only.

    Use it for a callback that writes files or sends data. Under `distribute`, the ranks wait for each other after the
    callbacks of an epoch. All ranks can then read the files that the callback has written. Keras' own callbacks need no
    such wrapper under `distribute`.

    Args:
        callback: a callback of Keras.
    """

    def __init__(self, callback: Any) -> None:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ArgumentError(f"OnFirstRank: got a {type(callback).__name__}; want a callback of keras.callbacks")
        super().__init__()
        self.callback = callback

    def set_params(self, params: Any) -> None:
        """Call the callback's set_params, on rank 0."""
        super().set_params(params)
        self._call("set_params", params)

    def set_model(self, model: Any) -> None:
        """Call the callback's set_model, on rank 0."""
        super().set_model(model)
        self._call("set_model", model)

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> None:
        if rank() == 0:
            getattr(self.callback, name)(*arguments, **keywords)


def _forwarding(name: str) -> Callable[..., None]:
    def hook(self: OnFirstRank, *arguments: Any, **keywords: Any) -> None:
        self._call(name, *arguments, **keywords)

    hook.__doc__ = f"Call the callback's {name}, on rank 0."
    return hook


for _hook in (
    f"on_{kind}{what}_{when}"
    for kind, what in (
        *((kind, what) for kind in ("train", "test", "predict") for what in ("", "_batch")),
        ("epoch", ""),
    )
    for when in ("begin", "end")
):
    setattr(OnFirstRank, _hook, _forwarding(_hook))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc] # Keras has no types
    """Saves the model on rank 0 whenever the monitored metric reaches a new best.

    `filepath` may be set later. List it after `MetricAverageCallback`, which gives all ranks the same metrics. The
    other ranks wait until rank 0 has decided and saved. All ranks can then read the file.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=filepath or f"best{suffix}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save on rank 0 if `save_freq` batches have passed. Every rank calls it."""
        if is_shared(self.model):
            super().on_train_batch_end(batch, logs)
        elif self._should_save_on_batch(batch):
            with on_first_rank() as is_first:
                if is_first:
                    self._save_model(epoch=self._current_epoch, batch=batch, logs=logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save on rank 0 if the model is saved by epochs. Every rank calls it."""
        if is_shared(self.model):  # the model's `save` writes on rank 0 only
            super().on_epoch_end(epoch, logs)
        elif self.save_freq == "epoch":
            with on_first_rank() as is_first:
                if is_first:
                    super().on_epoch_end(epoch, logs)
            self.best: Any = broadcast_object(getattr(self, "best", None), name="BestModelCheckpoint")
