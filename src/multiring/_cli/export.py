"""multiring export: write a torch module as an ONNX file that answers as the module does.

MODULE:FUNCTION names a function without arguments that returns the module and its sample inputs. MODULE is a module
that Python finds from the current folder, or a file such as model.py. The samples are a tensor, a tuple in the order of
forward's parameters, or a dict by their names. Their first dimension is the batch. The ONNX file is compared with the
module on the samples and on other sizes. If an answer differs, no file is written.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from multiring._cli.number_option import number
from multiring._cli.output import show, told_files
from multiring.errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="returns the module and its sample inputs")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the ONNX file, such as model.onnx")
    parser.add_argument(
        "--dynamic",
        action="append",
        default=[],
        metavar="NAME=DIM,...",
        help="dimensions of an input that may have any size, besides the batch; may be given for each input",
    )
    parser.add_argument(
        "--tolerance",
        type=number(0, 1, above=True),
        default=1e-4,
        metavar="SHARE",
        help="largest difference, as a share of the largest number of an output or of 1 (default 1e-4)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Export the module."""
    if not 0 < arguments.tolerance < 1:
        raise ArgumentError(f"--tolerance {arguments.tolerance:g}: want a number above 0 and below 1")
    dynamic = dict(map(_dimensions, arguments.dynamic))
    # torch takes seconds to import, and only this command needs it.
    from multiring.vision.exporting.modules import export_module  # noqa: PLC0415

    found = _called(arguments.function)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ArgumentError(f"{arguments.function} returned a {type(found).__name__}: want (module, samples)")
    with told_files():
        made = export_module(found[0], found[1], arguments.out, dynamic=dynamic, tolerance=arguments.tolerance)
    if arguments.json:
        show(json.dumps({"file": str(arguments.out), **asdict(made)}, ensure_ascii=False))
        return 0
    difference = f"largest difference {made.parity['largest_difference']:.2g} of the largest number"
    show(f"{made.parity['cases']} comparisons, {difference}: {arguments.out}")
    return 0


def _dimensions(text: str) -> tuple[str, list[int]]:
    name, is_given, dims = text.partition("=")
    try:
        return name, [int(dim) for dim in dims.split(",")] if is_given else [int("")]
    except ValueError:
        raise ArgumentError(f"--dynamic {text!r}: want NAME=DIM,..., such as pixels=1,2") from None


def _called(text: str) -> object:
    """Call the function MODULE:FUNCTION."""
    module_name, _, function_name = text.rpartition(":")
    if not module_name or not function_name.isidentifier():
        raise ArgumentError(f"{text!r}: want MODULE:FUNCTION, such as model.py:build")
    module = _imported(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ArgumentError(f"{module_name!r} has no function {function_name!r}")
    return function()


def _imported(name: str) -> ModuleType:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise ArgumentError(f"{name!r}: there is no such file")
        sys.path.insert(0, str(path.parent.absolute()))
        specification = importlib.util.spec_from_file_location(path.stem, path)
        assert specification is not None  # noqa: S101 -- of a .py file there is one
        assert specification.loader is not None  # noqa: S101 -- as above
        module = importlib.util.module_from_spec(specification)
        sys.modules[path.stem] = module
        specification.loader.exec_module(module)
        return module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise ArgumentError(f"module {name!r} is not found from {str(Path.cwd())!r}") from None
