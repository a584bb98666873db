"""A run's options, from a TOML file or from flags or both; options that are not given have the defaults below.

A program adds options by deriving from `TrainingOptions`. Every key and flag is a field's name; an unknown one is an
error.
"""

import argparse
import dataclasses
import inspect
import json
import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from multiring._arguments import (
    is_number,
    require_choice,
    require_flag,
    require_number,
    require_path,
    require_whole,
    shown,
    whole,
)
from multiring._replacing import replace_file
from multiring._schedule import WIRES
from multiring.errors import ArgumentError
from multiring.training.devices import DEVICES
from multiring.training.run_folder import METRICS, OPTIONS, PAGE, RESULT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTIMIZERS = ("sgd", "lars", "larc", "larc-adam", "adamw", "lamb")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """The options of a training. Batch sizes are totals of all ranks.

    A program adds options in a dataclass that derives from this one. The comment after a field explains the option in
    `--help`.

    Raises:
        ArgumentError: a value has another type than its option's default, is out of its range, or no choice of its
            option. Numbers of NumPy count as numbers of Python, and paths as text.
    """

    data: str = "data"  # the folder of the data set
    run: str = "run"  # the folder that the run is written to, and resumed from
    epochs: int = 5  # passes over all samples
    minutes: float = 0.0  # training ends after this many minutes, evaluation excluded; 0: no limit
    batch: int = 64  # samples per step
    micro_batch: int = 0  # samples that a rank computes at once; 0: its whole part of the batch
    optimizer: str = "sgd"  # sgd, lars, larc, larc-adam, adamw or lamb
    rate: float = 0.1  # the highest learning rate
    momentum: float = 0.9  # momentum of sgd, lars and larc
    weight_decay: float = 5e-5  # weight decay, except of biases and norms
    trust: float = 0.001  # eta of LARS and LARC
    warmup: float = 0.5  # epochs in which the rate grows linearly
    decay: str = "cosine"  # cosine, or poly for a polynomial of power 2
    end_rate: float = 0.0  # the learning rate at the end
    lag: int = 0  # steps by which gradients are applied late: 0 or 1
    clip: float = 0.0  # the largest norm of a gradient; 0: no limit
    ema: float = 0.0  # decay of the moving average of weights, for evaluation; 0: no average
    precision: str = "float32"  # float32; bf16 for torch.autocast; float64 to compare runs to the last digits
    device: str = "auto"  # auto: this rank's GPU where torch sees one, else the host; or cpu, or cuda
    wire: str = ""  # the wire type of gradients between hosts; empty: exact
    workers: int = 1  # threads per rank that read and decode
    seed: int = 0  # seed of the initial weights, and of the data's order and augmentation
    deterministic: bool = False  # the same bits in every run, at some cost of speed
    evaluate_every: float = 1.0  # epochs between two evaluations
    save_every: int = 200  # steps between two checkpoints
    keep: int = 2  # how many of the last checkpoints to keep, besides the best one
    log_every: int = 10  # steps between two lines of the log
    noise: bool = True  # measure the gradient noise scale, and say which batch still pays
    peak: bool = True  # measure what share of this machine's peak the training reaches
    plain: bool = False  # train without multiring, on one process, for comparison

    def __post_init__(self) -> None:
        require_types(self, TrainingOptions)
        require_path("run", self.run)
        require_number("epochs", self.epochs, self._fewest_epochs())
        for name in ("batch", "keep", "workers", "save_every", "log_every"):
            require_number(name, getattr(self, name), 1)
        for name in ("minutes", "micro_batch", "weight_decay", "warmup", "end_rate", "clip", "trust"):
            require_number(name, getattr(self, name))
        for name in ("momentum", "ema"):
            require_number(name, getattr(self, name), below=1)
        for name in ("rate", "evaluate_every"):
            require_number(name, getattr(self, name), above=True)
        require_choice("optimizer", self.optimizer, OPTIMIZERS)
        require_choice("decay", self.decay, ("cosine", "poly"))
        require_choice("precision", self.precision, ("float32", "bf16", "float64"))
        require_choice("device", self.device, DEVICES)
        require_choice("wire", self.wire, ("", *WIRES))
        require_whole("seed", self.seed, -(1 << 63), (1 << 64) - 1, wanted="a whole number of 64 bits, as torch does")
        if self.lag not in {0, 1}:
            raise ArgumentError(f"lag={self.lag}: want 0 or 1 steps")

    def _fewest_epochs(self) -> int:
        """Return the fewest epochs that make sense; 0 if something is trained before the first one."""
        return 1


def require_types(options: Any, kind: type) -> None:
    """Give each value of `options` the type of its option's default.

    Only the fields of `kind` count: a program that derives its options from them may have other rules for its own.

    Raises:
        ArgumentError: a value has another type, such as 2.5 for a whole number, or text for a number.
    """
    for field in dataclasses.fields(kind):
        name, value = field.name, getattr(options, field.name)
        # The class is frozen. The type counts: options are written as TOML, and 2.5 passes would end between batches.
        object.__setattr__(options, name, _of_type(name, value, type(field.default)))


def _of_type(name: str, value: Any, wanted: type) -> Any:
    if wanted is bool:
        return require_flag(name, value)
    if wanted is int:
        found = whole(value)
        if found is None:
            raise ArgumentError(f"{name}={shown(value)}: want a whole number")
        return found
    if wanted is float:
        if not is_number(value):
            raise ArgumentError(f"{name}={shown(value)}: want a number")
        try:
            return float(value)
        except OverflowError:  # an integer beyond float64; the check of the option's range refuses it
            return math.inf
    if isinstance(value, str | PurePath):
        return str(value)
    raise ArgumentError(f"{name}={shown(value)}: want a text")


Chosen = TypeVar("Chosen", bound=TrainingOptions)


def meanings(kind: type[TrainingOptions]) -> dict[str, str]:
    """Return the meaning of each option: the comment after its field, if there is one."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        with suppress(OSError, TypeError):  # a class that was typed into an interpreter has no source
            found |= dict(re.findall(r"^    (\w+): [^#\n]*  # (.*)$", inspect.getsource(each), re.MULTILINE))
    return found


def parse_options(kind: type[Chosen], words: Sequence[str] | None = None, description: str = "") -> Chosen:
    """Return the options of a command line; if they are wrong, end the program with a message and exit code 2.

    The arguments and errors are those of `given_options`.
    """
    return kind(**given_options(kind, words, description))


def given_options(
    kind: type[Chosen], words: Sequence[str] | None = None, description: str = "", *, program: str | None = None
) -> dict[str, Any]:
    """Return the options that a command line gives, without defaults; if they are wrong, end the program as above.

    `--options FILE` reads a TOML file. Each option also has a flag, such as `--evaluate-every`, which overrides the
    file.

    Args:
        kind: `TrainingOptions`, or a dataclass that derives from it. Each field needs a default of type str, int, float
            or bool.
        words: the words of the command line; by default those of this process.
        description: a sentence on the program for `--help`.
        program: how the command begins, for the line of usage; by default, the name of this process's program.

    Raises:
        ArgumentError: a field of `kind` has no such default.
    """
    # In the line of usage, "%" would begin a placeholder.
    program = None if program is None else program.replace("%", "%%")
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--options", type=Path, help="a TOML file of these options; the command line overrides it")
    meant = meanings(kind)
    for field in dataclasses.fields(kind):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if type(default) not in {str, int, float, bool}:
            raise ArgumentError(f"{kind.__name__}.{field.name}: want a default of type str, int, float or bool")
        text = f"{meant.get(field.name, '')} (default {default!r})".replace("%", "%%")
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, type=type(default), help=text)
    found = vars(parser.parse_args(words))
    path = found.pop("options")
    try:
        said = {} if path is None else read_options(path, kind)
        said.update({name: value for name, value in found.items() if value is not None})
        kind(**said)  # raises an error if a value is out of its range
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return said


def read_options(path: Path | str, kind: type[TrainingOptions]) -> dict[str, Any]:
    """Return the options in a TOML file, each value in its option's type; `kind(**options)` makes the options.

    Raises:
        ArgumentError: a key is not an option (the message lists the options), or a value has the wrong type.
        ValueError: the file is no TOML.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        said = tomllib.load(file)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, value in said.items():
        if name not in defaults:
            raise ArgumentError(f"{path}: {name!r} is not an option; want one of {', '.join(sorted(defaults))}")
        wanted = type(defaults[name])
        if wanted is float and type(value) is int:
            said[name] = float(value)
        elif type(value) is not wanted:
            raise ArgumentError(f"{path}: {name}={value!r}: want a value of type {wanted.__name__}")
    return said


def write(options: TrainingOptions, folder: Path) -> None:
    """Write every option, including defaults, into the run's folder.

    Raises:
        ArgumentError: the folder is not a run's, and has files that a run would overwrite.
    """
    there = [name for name in (OPTIONS, METRICS, RESULT, PAGE) if (folder / name).exists()]
    if there and not _is_options(folder / OPTIONS):
        raise ArgumentError(
            f"{folder} has {', '.join(there)}, and no {OPTIONS} of a run; nothing was written. Want an empty folder, "
            "or the folder of a run"
        )
    text = "".join(f"{name} = {_toml(value)}\n" for name, value in dataclasses.asdict(options).items())
    # A kill meanwhile leaves the former file: the next start goes on with the options in it.
    replace_file(folder / OPTIONS, text.encode(), is_ours=lambda _: True, what="the options of a run")


def _toml(value: object) -> str:
    """Return a value in TOML. Strings of JSON are strings of TOML, but for one control character."""
    return repr(value) if type(value) is float else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_options(path: Path) -> bool:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return {"epochs", "batch"} <= set(found)
