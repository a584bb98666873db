"""Callbacks under `distribute`: all ranks call the same callbacks, with the same logs, and stop together.

`around` adds callbacks before and after the user's callbacks of `fit`, `around_evaluation` those of `evaluate` and
`predict`. Callbacks that do the work of a single process, such as writing a log, are called on rank 0 only
(`on_one_rank`).
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from multiring._frontend.lifecycle import rank
from multiring._frontend.object_collectives import allgather_object
from multiring.errors import MismatchError
from multiring.keras.callbacks import BroadcastGlobalVariablesCallback, OnFirstRank
from multiring.keras.metric_states import MetricStates
from multiring.keras.replicas import digests
from multiring.keras.saving import SharedSaving
from multiring.keras.values import settled

# These callbacks write or send files without the model's own methods, so only one rank may call them.
_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("BackupAndRestore", "CSVLogger", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
    if hasattr(keras.callbacks, name)
)
_QUIET = (*_WRITERS, keras.callbacks.EarlyStopping, keras.callbacks.History, keras.callbacks.ProgbarLogger)


def around(own: Sequence[Any], states: MetricStates, saving: SharedSaving) -> list[Any]:
    """Return this rank's callbacks for `fit`: the user's callbacks, between two groups of multiring's callbacks.

    Every rank calls it.
    """
    wanted = (any(_acts_on_batches(each) for each in own), any(_restores(each) for each in own), saving.last_call())
    everybodys = allgather_object(wanted, name="keras.callbacks")
    by_batch, restores = (any(each[place] for each in everybodys) for place in (0, 1))
    saving.start(each[2] for each in everybodys)
    kept = _kept(own)
    for each in kept:
        if isinstance(each, keras.callbacks.ModelCheckpoint):
            _make_folders_first(each)
    first = _FirstOfBatches(states, saving) if by_batch else _First(saving)
    last = (_LastOfBatches if by_batch else _Last)(saving, restores=restores)
    return [Replicas(), first, *kept, last]


def around_evaluation(given: Any, saving: SharedSaving) -> list[Any]:
    """Return this rank's callbacks for `evaluate` or `predict`, of the callbacks that the user passed.

    Every rank calls it.
    """
    kept = _kept(listed(given))
    if saving.is_shared:  # a callback called this method; the shared phase of that callback continues
        return kept
    saving.start(allgather_object(saving.last_call(), name="keras.callbacks"))
    return [_First(saving), *kept, _Last(saving, restores=False)]


def listed(given: Any) -> list[Any]:
    """Return the callbacks that the user passed: nothing, one callback, a list or a CallbackList."""
    given = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else given
    return list(given) if isinstance(given, list | tuple) else [given] if given else []


def _kept(own: Sequence[Any]) -> list[Any]:
    return [each for each in own if rank() == 0 or not on_one_rank(each)]


def _make_folders_first(checkpoint: Any) -> None:
    """Make `checkpoint` accept a folder that another rank creates at the same time.

    Keras' callback looks for the folder and then creates it. If every rank does that, the second one fails.
    """
    plain = checkpoint._get_file_path  # noqa: SLF001 -- Keras has no public hook between name and folder
    if hasattr(plain, "multiring"):
        return

    @functools.wraps(plain)
    def path_in_folder(*arguments: Any, **keywords: Any) -> Any:
        path = plain(*arguments, **keywords)
        folder = os.path.dirname(os.fspath(path))  # noqa: PTH120 -- Path would shorten gs://
        if folder and "://" not in folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        return path

    path_in_folder.multiring = True  # type: ignore[attr-defined] # marks the replacement
    checkpoint._get_file_path = path_in_folder  # noqa: SLF001 -- as above


def on_one_rank(callback: Any) -> bool:
    """Return whether a callback is called on rank 0 only."""
    return isinstance(callback, (*_WRITERS, OnFirstRank))


def _restores(callback: Any) -> bool:
    return isinstance(getattr(callback, "callback", callback), keras.callbacks.BackupAndRestore)


def _acts_on_batches(callback: Any) -> bool:
    """Return whether a callback may use logs, stop, or save after a batch of training."""
    if isinstance(callback, OnFirstRank):
        return _acts_on_batches(callback.callback)
    if isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore):
        return bool(callback.save_freq != "epoch")
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch")
    if isinstance(callback, _QUIET) or type(callback).__module__.startswith("multiring."):
        return False
    hooks = (callback.on_train_batch_end, callback.on_batch_end)
    return not all(getattr(each, "_is_default", False) for each in hooks)


class Replicas(BroadcastGlobalVariablesCallback):
    """Broadcasts rank 0's variables before the first step, and checks later variables.

    A layer that is built in the first step has variables that were not broadcast. If they differ between ranks, the
    step has averaged gradients of different models.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._count = 0
        self._is_first = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables if the model is built."""
        super().on_train_begin(logs)
        self._count = len(self.model.weights) if self.broadcast_done else 0
        self._is_first = True
        self.broadcast_done = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare the ranks' variables after the first step if the step has created any.

        Raises:
            MismatchError: on every rank: the variables differ.
        """
        super().on_train_batch_end(batch, logs)
        if not self._is_first:
            return
        self._is_first = False
        if len(self.model.weights) != self._count:
            settled(self.model)
            everybodys = digests(self.model.weights)
            if any(each != everybodys[0] for each in everybodys):
                raise MismatchError(
                    f"layers of {self.model.name} were built in the first step, with different weights on each "
                    "rank: call keras.utils.set_random_seed before the model is made, or build the model before fit "
                    "(call it on a batch, or give it keras.Input)"
                )


class _First(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Runs before the user's callbacks: it starts the shared saving at each call."""

    def __init__(self, saving: SharedSaving) -> None:
        super().__init__()
        self._saving = saving

    def on_train_begin(self, logs: Any = None) -> None:
        """Start the shared saving."""
        del logs
        self._saving.begin()

    def on_train_end(self, logs: Any = None) -> None:
        """Start the shared saving."""
        del logs
        self._saving.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the shared saving."""
        del epoch, logs
        self._saving.begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Start the shared saving."""
        del epoch, logs
        self._saving.begin()

    def on_test_begin(self, logs: Any = None) -> None:
        """Start the shared saving."""
        del logs
        self._saving.begin()

    def on_test_end(self, logs: Any = None) -> None:
        """Start the shared saving."""
        del logs
        self._saving.begin()

    def on_predict_begin(self, logs: Any = None) -> None:
        """Start the shared saving."""
        del logs
        self._saving.begin()

    def on_predict_end(self, logs: Any = None) -> None:
        """Start the shared saving."""
        del logs
        self._saving.begin()


class _FirstOfBatches(_First):
    """Does the work of `_First`, and gives callbacks that act on batches the logs of all ranks."""

    def __init__(self, states: MetricStates, saving: SharedSaving) -> None:
        super().__init__(saving)
        self._states = states

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Replace the values in `logs` by those of all ranks."""
        del batch
        if logs:
            logs |= self._states.peeked(logs)
        self._saving.begin()


class _Last(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Runs after the user's callbacks: it waits for the other ranks, and stops all ranks together."""

    def __init__(self, saving: SharedSaving, *, restores: bool) -> None:
        super().__init__()
        self._saving = saving
        self._restores = restores

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the epoch and the variables that rank 0's callbacks have restored."""
        del logs
        told = self._saving.finish(self.model._initial_epoch)  # noqa: SLF001 -- Keras has no other name for it
        self.model._initial_epoch = told[0]  # noqa: SLF001
        if self._restores:
            again = BroadcastGlobalVariablesCallback(0)
            again.set_model(self.model)
            again.on_train_begin()

    def on_train_end(self, logs: Any = None) -> None:
        """Wait until all ranks' callbacks are done."""
        del logs
        self._saving.finish()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Wait until all ranks' callbacks are done."""
        del epoch, logs
        self._saving.finish()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop the training on all ranks if a callback on any rank wants to stop."""
        del epoch, logs
        self._stop()

    def on_test_begin(self, logs: Any = None) -> None:
        """Wait until all ranks' callbacks are done."""
        del logs
        self._saving.finish()

    def on_test_end(self, logs: Any = None) -> None:
        """Wait until all ranks' callbacks are done."""
        del logs
        self._saving.finish()

    def on_predict_begin(self, logs: Any = None) -> None:
        """Wait until all ranks' callbacks are done."""
        del logs
        self._saving.finish()

    def on_predict_end(self, logs: Any = None) -> None:
        """Wait until all ranks' callbacks are done."""
        del logs
        self._saving.finish()

    def _stop(self) -> None:
        self.model.stop_training = any(self._saving.finish(bool(self.model.stop_training)))


class _LastOfBatches(_Last):
    """Does the work of `_Last` for callbacks that act on batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop the training on all ranks if a callback on any rank wants to stop."""
        del batch, logs
        self._stop()
