"""Make `import horovod` find the package beside this file.

This works even if the program's folder has a `horovod` package.

Python runs this module at its start, because PYTHONPATH contains this folder. The module then runs the sitecustomize
that Python would have run without it.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from os.path import dirname

_HERE = dirname(__file__)  # noqa: PTH120 -- importing pathlib takes longer than this whole module


class _Finder:
    """Finds `horovod` in this folder before Python searches any path."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_HERE]) if name == "horovod" else None


def _run_the_next() -> None:
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != _HERE])
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec  # noqa: PLC0415 -- for a fast start, like the note above

    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder)
_run_the_next()
