"""Run a Python script for `multiring profile`: python -m multiring._launch.profiled FOLDER OPTIONS SCRIPT...

The script runs as `python SCRIPT...` would run it. Once it imports torch or Keras, their hooks are installed. What they
find goes to files of FOLDER: `PROFILE`, or `REFUSAL` with the reason why there is none.
"""

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from multiring._launch.own_modules import module_command
from multiring._launch.script_copies import ScriptCopies

PROFILE, REFUSAL = "profile.json", "refusal.txt"
_ALONE = "multiring.torch.alone"
# Other frameworks, by the module that a script imports.
_OTHERS = {
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "chainer": "Chainer",
    "caffe": "Caffe",
    "mxnet": "MXNet",
    "paddle": "PaddlePaddle",
}
_SERVED = "want plain torch, mt.distribute, DistributedDataParallel, or Keras on torch (KERAS_BACKEND=torch)"


def profiled_command(
    python: Sequence[str],
    folder: Path,
    *,
    steps: int,
    goes_on: bool,
    words: Sequence[str],
    beside: Sequence[Path] = (),
) -> list[str]:
    """Return the command that profiles a Python script.

    Args:
        python: the Python, and its own options.
        folder: where the script's process leaves the profile or the refusal.
        steps: the number of steps to measure.
        goes_on: whether the script goes on to its end after these steps.
        words: the script, or `-m MODULE`, with arguments.
        beside: the folders of the copies that run beside the script while it is measured.
    """
    options = json.dumps({"steps": steps, "goes_on": goes_on, "beside": list(map(str, beside))})
    return [*python, *module_command(__spec__.name, str(folder), options, *words)[1:]]


class _AfterImport:
    """Finds a module as Python would, and calls a function once the module is imported."""

    def __init__(self, calls: dict[str, Callable[[], None]]) -> None:
        self._calls = calls

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002 -- a finder's
        call = self._calls.pop(name, None)
        if call is None:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, call)
        return spec


class _Calling(Loader):
    def __init__(self, loader: Any, call: Callable[[], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # The module and its files belong to the loader that found it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._call()


class _Profiling:
    """The profile of this process's script; `hooks` is the recording, once the script has imported torch."""

    def __init__(self, folder: Path, steps: int, words: Sequence[str], *, goes_on: bool, beside: Sequence[str]) -> None:
        self._folder, self._steps, self._words, self._goes_on = folder, steps, words, goes_on
        self._copies = ScriptCopies(folder, list(map(Path, beside)))
        self._hooks: Any = None
        self._backend = ""  # Keras' backend, if it is not torch

    def finders(self) -> _AfterImport:
        calls = {"torch": self._see_torch, "keras": self._see_keras, _ALONE: _exchange_alone}
        return _AfterImport(calls)

    def _see_torch(self) -> None:
        hooks = importlib.import_module("multiring.torch.profiling.hooks")
        self._hooks = hooks.record(
            hooks.RecordedScript(
                words=" ".join(self._words),
                steps=self._steps,
                goes_on=self._goes_on,
                write=lambda profile: self._tell(PROFILE, profile.as_text()),
                refuse=lambda reason: self._tell(REFUSAL, reason),
                meet=self._copies.meet,
                copies=lambda: 1 + self._copies.running(),
            )
        )

    def _see_keras(self) -> None:
        profiling = importlib.import_module("multiring.keras.profiling")
        if not profiling.follow_updates(self._update):
            self._backend = sys.modules["keras"].backend.backend()

    def _update(self, *update: Any) -> Any:
        # Keras imports its backend before it is imported itself, so the hooks exist.
        return self._hooks.keras_update(*update)

    def finish(self) -> None:
        """Write the profile, or why there is none."""
        if any((self._folder / name).exists() for name in (PROFILE, REFUSAL)):
            return
        if self._hooks is not None and self._hooks.steps:
            self._hooks.finish()
            return
        if self._backend:
            reason = f"the script trains by Keras on {self._backend}, which multiring cannot profile: {_SERVED}"
        else:
            found = [title for name, title in _OTHERS.items() if name in sys.modules]
            reason = (
                f"the script made no step of an optimizer: {_SERVED}. Steps in child processes are not seen; start the "
                "program that steps itself"
            )
            if found and self._hooks is None:
                reason = f"the script uses {' and '.join(found)}, which multiring cannot profile: {_SERVED}"
        self._tell(REFUSAL, reason)

    def _tell(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text, encoding="utf-8")


def _exchange_alone() -> None:
    sys.modules[_ALONE].LONE_RANK.exchanges = True


def main(arguments: Sequence[str]) -> None:
    """Run the script in this process."""
    folder, options, *words = arguments
    profiling = _Profiling(Path(folder), words=words, **json.loads(options))
    sys.meta_path.insert(0, profiling.finders())
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
        profiling.finish()
        raise
    profiling.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
