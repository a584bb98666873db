"""Saving of a distributed model: rank 0 alone writes while callbacks run, and files are always complete.

All ranks call the same callbacks in the same order, but a callback may save on some ranks only. Rank 0 therefore saves
at once, reports the path, and waits for no rank. Another rank that wants to save waits for this report, and then
continues, because the file is complete. If rank 0 finishes its callbacks without saving to that path, or waits in a
collective that the other rank has not reached, the other rank writes the file itself. After their callbacks all ranks
meet, so every rank can then read the files of all ranks.
"""

import functools
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from multiring._frontend.first_rank_reports import FirstRankReports, OutcomeKind, first_rank_reports
from multiring._frontend.lifecycle import rank
from multiring._frontend.object_collectives import allgather_object
from multiring.errors import MismatchError, MultiringError

METHODS = ("save", "save_weights", "export")
_END_OF_CALLBACKS = "keras.callbacks"  # the name of the operation in which the ranks meet after their callbacks
_SAVING = "_multiring_saving"  # the attribute of a model that has its SharedSaving
# Keras' saving functions, such as keras.saving.save_model, write with these functions.
_WRITERS = ((saving_lib, "save_model"), (saving_lib, "save_weights_only"), (legacy_h5_format, "save_model_to_hdf5"))


class SharedSaving:
    """Coordinates the ranks when they save a model."""

    def __init__(self, model: Any) -> None:
        self._reports: FirstRankReports | None = None  # None before the first call of `fit`, `evaluate` or `predict`
        self._phase = (0, 0)
        self._in_callbacks = False
        self._writing = threading.local()  # has the attribute `is_nested` in a thread that writes
        self._wanted: Counter[str] = Counter()  # how often this rank has saved to each path in this phase
        self._failure: tuple[Exception, str] | None = None  # the error of this phase's latest failed save, and its text
        setattr(model, _SAVING, self)
        for module, name in _WRITERS:
            _have_shared(module, name)
        for name in METHODS:
            plain = getattr(model, name)
            found = functools.wraps(plain)(functools.partial(self.save, name, plain))
            setattr(model, name, found)

    @property
    def is_shared(self) -> bool:
        """Whether all ranks are calling callbacks."""
        return self._in_callbacks

    def last_call(self) -> int:
        """Return the number of this rank's latest call of `fit`, `evaluate` or `predict` of any model in this job."""
        self._reports = first_rank_reports()
        return self._reports.last_call

    def start(self, last_calls: Iterable[int]) -> None:
        """Number a call of `fit`, `evaluate` or `predict`, given each rank's `last_call`."""
        self._reports = first_rank_reports()
        self._reports.last_call = max(last_calls) + 1
        self._phase = (self._reports.last_call, 0)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a call of `fit`, `evaluate` or `predict`.

        If the call ends because a save of this rank has failed, the other ranks raise an error, too.
        """
        if self.is_shared:  # a callback evaluates: its phase continues
            yield
            return
        try:
            yield
        except Exception as error:
            self._tell_failure(error)
            raise
        finally:
            if self._in_callbacks and self._reports is not None:
                self._in_callbacks = False
                self._reports.close(self._phase)

    def begin(self) -> None:
        """Start a phase in which all ranks call callbacks."""
        call, hook = self._phase
        self._phase = (call, hook + 1)
        self._in_callbacks = True
        self._wanted.clear()
        self._failure = None
        if self._reports is not None:
            self._reports.open(self._phase)

    def finish(self, told: Any = None) -> list[Any]:
        """Wait until all ranks have called their callbacks; return the argument `told` of each rank, by rank.

        Raises:
            MismatchError: a rank has left its callbacks because it could not save.
        """
        if self._reports is not None:
            self._reports.close(self._phase)
        try:
            events = allgather_object({"done": told}, name=_END_OF_CALLBACKS)
        finally:
            self._in_callbacks = False
        if self._reports is not None:
            self._reports.forget(self._phase)
        for each in events:
            if "failed" in each:
                raise MismatchError(each["failed"])
        return [each["done"] for each in events]

    def _tell_failure(self, error: Exception) -> None:
        """Have the other ranks raise an error if this rank leaves its callbacks with the error of a failed save."""
        if not self._in_callbacks or self._failure is None:
            return
        failed, text = self._failure
        cause: BaseException | None = error
        while cause is not None and cause is not failed:
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            return
        if self._reports is not None:
            self._reports.close(self._phase)
        with suppress(MultiringError):  # the error of the save is the one to raise
            allgather_object({"failed": text}, name=_END_OF_CALLBACKS)

    def save(self, name: str, plain: Callable[..., Any], filepath: Any, *arguments: Any, **keywords: Any) -> Any:
        """Save with `plain`, Keras' method or function `name`.

        The module's docstring describes the protocol.
        """
        # `filepath` is an open file, or the call comes from Keras' own saving method.
        is_nested = getattr(self._writing, "is_nested", False)
        if is_nested or not isinstance(filepath, str | os.PathLike):
            return plain(filepath, *arguments, **keywords)
        write = functools.partial(self._write, name, plain, filepath, *arguments, **keywords)
        path = os.fspath(filepath)
        if not self._in_callbacks or self._reports is None:
            return write()
        if rank() == 0:
            try:
                found = write()
            except Exception as error:
                self._failure = error, _not_saved(path, error)
                self._reports.report(self._phase, path, failed=self._failure[1])
                raise
            self._reports.report(self._phase, path)
            return found
        self._wanted[path] += 1
        kind, text = self._reports.learn(self._phase, path, self._wanted[path])
        if kind is OutcomeKind.DONE:
            return None
        if kind is OutcomeKind.FAILED:
            refused = MismatchError(text)
            self._failure = refused, text
            raise refused
        try:
            return write()
        except Exception as error:
            self._failure = error, _not_saved(path, error)
            raise

    def _write(self, name: str, plain: Callable[..., Any], filepath: Any, *arguments: Any, **keywords: Any) -> Any:
        self._writing.is_nested = True
        try:
            if name == "export":
                return plain(filepath, *arguments, **keywords)
            return _written_whole(plain, filepath, *arguments, **keywords)
        finally:
            self._writing.is_nested = False


def _not_saved(path: str, error: Exception) -> str:
    return f"rank {rank()} could not save {path}: {type(error).__name__}: {error}"


def _have_shared(module: Any, name: str) -> None:
    """Make one of Keras' saving functions use the model's SharedSaving, if the model has one."""
    plain = getattr(module, name)
    if hasattr(plain, "multiring"):
        return

    @functools.wraps(plain)
    def save(model: Any, filepath: Any, *arguments: Any, **keywords: Any) -> Any:
        saving: SharedSaving | None = getattr(model, _SAVING, None)
        if saving is None:
            return plain(model, filepath, *arguments, **keywords)
        return saving.save(name, functools.partial(plain, model), filepath, *arguments, **keywords)

    save.multiring = True  # type: ignore[attr-defined]
    setattr(module, name, save)


def _written_whole(plain: Callable[..., Any], filepath: Any, *arguments: Any, **keywords: Any) -> Any:
    """Save to a temporary folder, and rename the file: a reader finds the old file or the complete new file."""
    path = Path(os.fspath(filepath))
    overwrites = arguments[0] if arguments else keywords.get("overwrite", True)
    if "://" in os.fspath(filepath) or path.is_dir() or (path.exists() and not overwrites):
        return plain(filepath, *arguments, **keywords)  # Keras asks the user, or refuses
    if not path.parent.is_dir():
        return plain(filepath, *arguments, **keywords)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        found = plain(
            folder / path.name if isinstance(filepath, Path) else str(folder / path.name), *arguments, **keywords
        )
        for each in sorted(folder.iterdir(), key=lambda one: one.name == path.name):  # the main file last
            each.replace(path.parent / each.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found
