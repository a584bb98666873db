"""The study in this process's memory, and the thread that writes it to a storage.

Samplers and pruners read and write memory only. The thread compares each trial that has changed with what the storage
has of it, and writes the difference. So a slow storage delays nobody, a lost one costs nothing but itself, and a trial
that changes ten times meanwhile is written once.
"""

import copy
import logging
import math
import os
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from multiring.errors import ArgumentError
from multiring.trials.space import space_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

_log = logging.getLogger("multiring")
_FIRST_AGAIN_S, _LAST_AGAIN_S = 0.5, 30.0
_LOST_S, _TURN_S = 5.0, 0.1  # how long the end of a study waits for a storage that is lost, and between two looks
_SQLITE = {".db", ".sqlite", ".sqlite3"}
REASON, RANKS, SPACE = "multiring:reason", "multiring:ranks", "multiring:space"  # attributes that a study's page shows
COMMAND, JUDGED = "multiring:command", "multiring:judged"  # the words of a trial's command; figures of new seeds
LINES = "multiring:lines"  # the patterns of the lines by which a trial's command reports
_INTERRUPTED = "interrupted: "  # the reasons of trials that do not count
INTERRUPTED = f"{_INTERRUPTED}its job ended first; its parameters are tried again as another trial"


def opened(storage: Any) -> "tuple[BaseStorage, Path | None]":
    """Return a storage, and its file if it has one.

    Args:
        storage: a URL of SQLAlchemy, a path, or a storage of Optuna. A path that ends in .db, .sqlite or .sqlite3 is
            one of SQLite; another is a journal.

    Raises:
        ArgumentError: it cannot be opened.
    """
    from optuna.storages import BaseStorage, RDBStorage  # noqa: PLC0415 -- as in space.py

    from multiring.trials.journal import opened_journal  # noqa: PLC0415 -- it needs Optuna

    if isinstance(storage, BaseStorage):
        return storage, None
    if not isinstance(storage, str | os.PathLike):
        raise ArgumentError(f"storage={storage!r}: want a URL, a path, or a storage of Optuna")
    text = os.fspath(storage)
    try:
        if "://" not in text and Path(text).suffix not in _SQLITE:
            return opened_journal(text), Path(text).absolute()
        url = text if "://" in text else f"sqlite:///{text}"
        path = url.partition("?")[0].removeprefix("sqlite:///") if url.startswith("sqlite:///") else ""
        return RDBStorage(url), Path(path).absolute() if path else None
    except Exception as error:
        raise storage_error(storage, error) from error


def storage_error(storage: Any, error: Exception) -> ArgumentError:
    """Return the error about a storage that cannot be opened, read or written.

    Args:
        storage: as the user gave it.
        error: the storage's own.
    """
    return ArgumentError(
        f"storage {shown_storage(storage)}: it cannot be opened ({_first_line(error)}); want one that can be written, "
        "whose driver is installed"
    )


def shown_storage(storage: Any) -> str:
    """Return a storage for an error: a URL without its password."""
    if not isinstance(storage, str | os.PathLike):
        return repr(storage)
    url = os.fspath(storage)
    head, at, tail = url.rpartition("@")
    scheme, sep, user = head.partition("://")
    return repr(f"{scheme}{sep}{user.partition(':')[0]}:...{at}{tail}" if at and sep else url)


def _first_line(error: BaseException) -> str:
    root = error.__cause__ or error
    return f"{type(root).__name__}: {str(root).partition(chr(10))[0]}"


def is_interrupted(trial: "FrozenTrial") -> bool:
    """Return whether a trial does not count, because its job ended, or the rank that held the study was lost."""
    return str(trial.user_attrs.get(REASON, "")).startswith(_INTERRUPTED)


def later(study: "Study", storage: "Callable[[], Any]") -> "StorageWriter":
    """Return a writer that opens its storage on its own thread: nothing waits for a storage that is slow or gone.

    Args:
        study: a study in memory that `storage` has in an earlier state.
        storage: returns what `opened` takes.
    """
    writer = StorageWriter(study, None, -1, [])

    def opening() -> None:
        import optuna  # noqa: PLC0415 -- as in space.py

        found, path = opened(storage())
        name, direction = study.study_name, study.direction
        kept = optuna.create_study(storage=found, study_name=name, direction=direction, load_if_exists=True)
        trials = kept.get_trials(deepcopy=False)
        writer.write_to(found, kept._study_id, [each._trial_id for each in trials])  # noqa: SLF001 -- as below
        kept.set_user_attr(SPACE, study.user_attrs.get(SPACE))
        if path is not None:
            writer.watch(path)

    writer.opening = opening
    return writer


def study_in_memory(
    name: str,
    direction: Literal["minimize", "maximize"],
    space: "dict[str, BaseDistribution]",
    sampler: Any,
    pruner: Any,
    storage: "BaseStorage | None",
) -> "tuple[Study, StorageWriter | None]":
    """Return a study whose trials are those of the storage, and the writer that keeps the storage up to date.

    Trials that an earlier job has not finished fail as interrupted, and wait to be tried again.

    Raises:
        ArgumentError: the storage has a study of this name with another space or direction.
    """
    import optuna  # noqa: PLC0415 -- as in space.py

    memory = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=memory, sampler=sampler, pruner=pruner, study_name=name, direction=direction)
    if storage is None:
        return study, None
    kept = optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
    if kept.direction.name.lower() != direction:
        raise ArgumentError(
            f"direction={direction!r}: the storage has a study {name!r} that wants to {kept.direction.name.lower()}; "
            "give this study another name"
        )
    trials = kept.get_trials(deepcopy=True)
    _require_same_space(name, space, kept.user_attrs.get(SPACE), trials)
    kept.set_user_attr(SPACE, space_text(space))
    for key, value in {**kept.user_attrs, SPACE: space_text(space)}.items():
        study.set_user_attr(key, value)
    known = [each._trial_id for each in trials]  # noqa: SLF001 -- Optuna's numbers of trials have no public name
    writer = StorageWriter(study, storage, kept._study_id, known)  # noqa: SLF001
    again = []
    for each in trials:
        if not each.state.is_finished():
            again.append(each.params or each.system_attrs.get("fixed_params", {}))
            each.state, each.values = optuna.trial.TrialState.FAIL, None
            each.user_attrs[REASON] = INTERRUPTED
            each.datetime_complete = datetime.now()  # noqa: DTZ005 -- Optuna's times are local
            each.datetime_start = each.datetime_start or each.datetime_complete
        study.add_trial(each)
        if each.user_attrs.get(REASON) == INTERRUPTED:
            writer.note(each.number)
    for params in again:
        study.enqueue_trial({key: value for key, value in params.items() if key in space})
        writer.note(len(study.get_trials(deepcopy=False)) - 1)
    if trials:
        study.sampler.reseed_rng()  # with its seed alone, it would begin with the same parameters again
    return study, writer


def _require_same_space(
    name: str, space: "dict[str, BaseDistribution]", text: str | None, trials: "list[FrozenTrial]"
) -> None:
    from optuna.distributions import check_distribution_compatibility  # noqa: PLC0415 -- as in space.py

    wrong = "" if text is None or text == space_text(space) else f"the space {text}"
    for each in trials if text is None else ():  # a study that Optuna has made
        for key, found in each.distributions.items():
            with suppress(ValueError, KeyError):
                check_distribution_compatibility(found, space[key])
                continue
            wrong = wrong or f"trial {each.number} with parameter {key!r} from {found}"
    if wrong:
        raise ArgumentError(
            f"space: the storage has a study {name!r} with {wrong}, and this one has {space_text(space)}; give this "
            "study another name, or the old space"
        )


def _snapshot_of(trial: "FrozenTrial") -> "FrozenTrial":
    """Return a copy that later changes of the trial do not reach. It is not deep: a trial may have 10,000 reports."""
    found = copy.copy(trial)
    found.params, found.distributions = dict(trial.params), dict(trial.distributions)
    found.intermediate_values = dict(trial.intermediate_values)
    found.user_attrs, found.system_attrs = dict(trial.user_attrs), dict(trial.system_attrs)
    return found


class StorageWriter:
    """Writes the trials of a study in memory to a storage, on a thread of its own.

    Args:
        study: the study in memory.
        storage: the storage to write to. No other program may add trials to this study meanwhile. None: `opening` gives
            it.
        number: the number of the study in `storage`.
        known: the numbers that the study's trials have in `storage` so far.
    """

    def __init__(self, study: "Study", storage: "BaseStorage | None", number: int, known: list[int]) -> None:
        self._study, self._number, self._known = study, number, known
        self._storage: Any = storage
        self.opening: Callable[[], None] = lambda: None  # calls `write_to` if there is no storage yet
        self._refused: set[int] = set()  # trials whose numbers others have in the storage
        self._written: dict[int, FrozenTrial] = {}
        self._changed = threading.Condition()
        self._dirty: dict[int, FrozenTrial] = {}  # the trials to write, as they are in memory
        self._writing: set[int] = set()  # the trial that is being written
        self._is_over = False
        self._gives_up = threading.Event()
        self._is_lost = False  # whether the last write failed
        self._taken = 0  # how many values the storage has taken
        self.require: Callable[[], None] = lambda: None  # raises OSError if the storage's file is gone
        self._thread = threading.Thread(target=self._run, name="multiring study storage", daemon=True)

    def watch(self, path: Path) -> None:
        """Report the storage as lost once another file, or none, is at its path: writes to it would be lost."""
        stat = path.stat()

        def require() -> None:
            now = path.stat()
            if (now.st_dev, now.st_ino) != (stat.st_dev, stat.st_ino):
                raise FileNotFoundError(f"{path} was replaced by another file")

        self.require = require

    def write_to(self, storage: "BaseStorage", number: int, known: list[int]) -> None:
        """Take the storage; the arguments are those of the class."""
        self._storage, self._number, self._known = storage, number, known

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def note(self, number: int) -> None:
        """Write the trial soon, as it is now. The thread that changes the study calls it."""
        now = _snapshot_of(self._study.get_trials(deepcopy=False)[number])
        with self._changed:
            self._dirty[number] = now
            self._changed.notify_all()

    def keep(self, key: str, value: Any) -> None:
        """Write an attribute of the study, for its page and for later jobs. A storage that is lost is told."""
        self._study.set_user_attr(key, value)
        try:
            self.require()
            self._storage.set_study_user_attr(self._number, key, value)
        except Exception as error:  # noqa: BLE001 -- as in `_run`
            _log.warning("trials: the storage does not take %s (%s)", key, _first_line(error))

    @property
    def unsaved(self) -> int:
        """The number of trials that the storage does not have as they are in memory."""
        with self._changed:
            return len(self._dirty.keys() | self._writing | self._refused)

    def close(self, seconds: float, *, is_patient: bool = False) -> int:
        """Wait until all is written, but at most `seconds`, or less if the storage is lost.

        Args:
            seconds: see above.
            is_patient: count `seconds` from the last value that the storage has taken: a thousand reports take some
                storages a minute.

        Return how many trials are not written.
        """
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        until_s = time.monotonic() + seconds
        told_s = lost_s = time.monotonic() + min(seconds, _LOST_S)
        seen = self._taken
        while self._thread.is_alive() and time.monotonic() < (lost_s if self._is_lost else until_s):
            self._thread.join(_TURN_S)
            if is_patient and self._taken != seen:
                seen, until_s = self._taken, time.monotonic() + seconds
            if time.monotonic() > told_s and not self._is_lost:
                told_s = math.inf
                _log.warning("trials: the storage is slow; %d trials are still being written to it", self.unsaved)
        self._gives_up.set()
        return self.unsaved

    def _run(self) -> None:
        again_s = _FIRST_AGAIN_S
        while not self._gives_up.is_set():
            with self._changed:
                while not self._dirty and not self._is_over:
                    self._changed.wait(1.0)
                if not self._dirty:
                    return
                number = min(self._dirty)  # trials get their numbers in the order in which they are written first
                now = self._dirty.pop(number)
                self._writing = {number}
            try:
                if self._storage is None:
                    self.opening()
                self.require()
                self._write(number, now)
            except Exception as error:  # noqa: BLE001 -- each storage has errors of its own, and the study goes on
                self._say(error)
                # The storage may have the value nevertheless: the network or fsync failed after it.
                self._written.pop(number, None)
                with self._changed:
                    self._dirty.setdefault(number, now)
                    self._writing = set()
                    is_over = self._is_over
                self._gives_up.wait(_FIRST_AGAIN_S if is_over else again_s)
                again_s = min(2 * again_s, _LAST_AGAIN_S)
            else:
                self._writing, again_s = set(), _FIRST_AGAIN_S
                if self._is_lost:
                    self._is_lost = False
                    _log.warning("trials: the storage takes the study's trials again")

    def _say(self, error: Exception) -> None:
        if not self._is_lost:
            self._is_lost = True
            _log.warning(
                "trials: the storage takes nothing (%s); the study goes on in memory, and what is missing is written "
                "once the storage is back",
                _first_line(error),
            )

    def _write(self, number: int, now: Any) -> None:
        """Write what the storage does not have of the trial."""
        from optuna.trial import TrialState  # noqa: PLC0415 -- as in space.py

        if number == len(self._known):
            if self._storage.get_n_trials(self._number) == number:
                self._known.append(self._storage.create_new_trial(self._number, template_trial=now))
                self._written[number] = now
                return
            # An earlier try has made it, and then failed.
            self._known.append(self._storage.get_trial_id_from_study_id_trial_number(self._number, number))
        trial = self._known[number]
        before: Any = self._written.get(number) or self._storage.get_trial(trial)
        if any(before.params[name] != value for name, value in now.params.items() if name in before.params):
            # The study has moved, and its last trial had come to the storage, but not to the study's copy.
            if number not in self._refused:
                _log.warning("trials: the storage has another trial %d, so this one is not written", number)
            self._refused.add(number)
            return
        if before.state.is_finished():
            return
        self._write_parts(trial, before, now)
        if now.state not in (before.state, TrialState.WAITING):
            self._storage.set_trial_state_values(trial, now.state, now.values)
        self._written[number] = now
        self._taken += 1

    def _write_parts(self, trial: int, before: Any, now: Any) -> None:
        """Write the parameters, reports and attributes that `now` has and `before` has not."""
        for name, value in now.params.items():
            if name not in before.params:
                distribution = now.distributions[name]
                self._storage.set_trial_param(trial, name, distribution.to_internal_repr(value), distribution)
        for step, value in now.intermediate_values.items():
            if step not in before.intermediate_values:
                self._storage.set_trial_intermediate_value(trial, step, value)
                self._taken += 1
        for old, new, put in (
            (before.user_attrs, now.user_attrs, self._storage.set_trial_user_attr),
            (before.system_attrs, now.system_attrs, self._storage.set_trial_system_attr),
        ):
            for key, value in new.items():
                if key not in old or old[key] != value:
                    put(trial, key, value)
