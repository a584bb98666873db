"""Saving of a distributed model: rank 0 alone writes while callbacks run, and files are always complete.

All ranks call the same callbacks in the same order, but a callback may save on some ranks only. The ranks therefore
exchange events in rounds. A rank joins a round whenever it wants to save, and when its callbacks are done.
Rank 0 reports each path that it has saved. Another rank that wants to save repeats rounds until rank 0 has saved to the
same path, and then continues, because the file is complete. If rank 0 finishes its callbacks without saving to that
path, the other rank writes the file itself. In the last round all ranks are done.
"""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from multiring._frontend.lifecycle import rank
from multiring._frontend.object_collectives import allgather_object
from multiring.errors import MismatchError

METHODS = ("save", "save_weights", "export")
_SAVING = "_multiring_saving"  # the attribute of a model that has its SharedSaving
# Keras' saving functions, such as keras.saving.save_model, write with these functions.
_WRITERS = ((saving_lib, "save_model"), (saving_lib, "save_weights_only"), (legacy_h5_format, "save_model_to_hdf5"))


class SharedSaving:
    """Coordinates the ranks when they save a model."""

    def __init__(self, model: Any) -> None:
        self._in_callbacks = False
        self._is_writing = False
        self._saved: set[str] = set()  # the paths that rank 0 has saved since `begin`
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

    def begin(self) -> None:
        """Start a phase in which all ranks call callbacks."""
        self._in_callbacks = True
        self._saved.clear()

    def finish(self, told: Any = None) -> list[Any]:
        """Wait until all ranks have called their callbacks; return the argument `told` of each rank, by rank."""
        try:
            while True:
                events = self._round({"done": told})
                if all("done" in each for each in events):
                    return [each["done"] for each in events]
        finally:
            self._in_callbacks = False

    def _round(self, event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        events: list[Mapping[str, Any]] = allgather_object(event, name="keras.callbacks")
        if "failed" in events[0] and rank() != 0:
            raise MismatchError(f"rank 0 could not save {events[0]['path']}: {events[0]['failed']}")
        if "path" in events[0]:
            self._saved.add(events[0]["path"])
        return events

    def save(self, name: str, plain: Callable[..., Any], filepath: Any, *arguments: Any, **keywords: Any) -> Any:
        """Save with `plain`, Keras' method or function `name`.

        The module's docstring describes the protocol.
        """

        def write() -> Any:
            self._is_writing = True
            try:
                if name == "export":
                    return plain(filepath, *arguments, **keywords)
                return _written_whole(plain, filepath, *arguments, **keywords)
            finally:
                self._is_writing = False

        # `filepath` is an open file, or the call comes from Keras' own saving method.
        if self._is_writing or not isinstance(filepath, str | os.PathLike):
            return plain(filepath, *arguments, **keywords)
        path = os.fspath(filepath)
        if not self._in_callbacks:
            return write()
        if rank() == 0:
            try:
                found = write()
            except Exception as error:
                self._round({"path": path, "failed": f"{type(error).__name__}: {error}"})
                raise
            self._round({"path": path})
            return found
        while path not in self._saved:
            if "done" in self._round({"wants": path})[0]:
                return write()
        self._saved.discard(path)
        return None


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
