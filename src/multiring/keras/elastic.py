"""Elastic training with `fit`, which resumes after a failure; Horovod's interface. See multiring.torch.elastic."""

from typing import Any

import keras

from multiring._frontend.elastic.own import OwnValue, Randomness, RankChange
from multiring._frontend.elastic.running import run
from multiring._frontend.elastic.speed_shares import SpeedShares
from multiring._frontend.elastic.state import ObjectState, State
from multiring._frontend.elastic.values_state import ValuesState
from multiring.keras.values import broadcast_variables, settled

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "OwnValue",
    "Randomness",
    "RankChange",
    "SpeedShares",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ValuesState):
    """The state of a Keras model, its optimizer and further attributes.

    The callbacks below need the attributes `batch` and `epoch`.

    Args:
        model: a model that is built.
        optimizer: by default the optimizer that the model is compiled with.
        kwargs: further attributes, with values that `broadcast_object` accepts.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(**kwargs)

    def _variables(self) -> list[Any]:
        settled(self.model)
        return [*self.model.variables, *([] if self.optimizer is None else self.optimizer.variables)]

    def _read(self) -> list[Any]:
        return [keras.ops.convert_to_numpy(variable.value).copy() for variable in self._variables()]

    def _write(self, values: list[Any]) -> None:
        for place, variable in enumerate(self._variables()):
            # An optimizer has more variables after its first step. Set variables without a saved value to zero.
            variable.assign(values[place] if place < len(values) else keras.ops.zeros_like(variable.value))

    def _share(self) -> list[Any]:
        broadcast_variables(self._variables(), self.sync_root)
        return self._read()


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Commits the state after every `batches_per_commit` batches, and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Start to count batches."""
        del logs
        self._left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit the state if enough batches have passed."""
        del batch, logs
        self._left -= 1
        if self._left == 0:
            self.state.commit()
            self._left = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit the state."""
        del epoch, logs
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Sets `state.batch` to the number of finished batches in the epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start from the number of batches that were finished before a failure, because `fit` counts from 0."""
        del epoch, logs
        self._first = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Update `state.batch`."""
        del logs
        self.state.batch = self._first + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set `state.batch` to 0."""
        del epoch, logs
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Sets `state.epoch` to the number of finished epochs, over several calls of `fit`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Start from the number of epochs finished before this call of `fit`."""
        del logs
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Update `state.epoch`."""
        del logs
        self.state.epoch = self._first + epoch + 1
