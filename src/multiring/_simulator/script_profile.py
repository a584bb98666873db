"""The profile of a user's script on one rank: what `multiring profile` writes, and `multiring simulate` predicts from.

The file is JSON; docs/profile.md describes its fields.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from multiring.errors import ArgumentError
from multiring.planner.parallelism import Compute, GradientExchange, Overheads, Profile, Unit

FORMAT = 1
DDP = "DistributedDataParallel"
_VERSION = "multiring_profile"


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """A gradient: its parameter's name, its bytes, and the seconds after the start of backward when it was ready."""

    name: str
    bytes: int
    ready_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSeconds:
    """The medians of a step's parts in seconds, over the measured steps.

    With several backwards a step, `forward` is all compute before the last backward, and `backward` is that backward.
    `input` is the wait for the loader, and `other` what none of the other parts is. `step` is their sum. `step_low` and
    `step_high` are the quartiles of the step.
    """

    step: float
    step_low: float
    step_high: float
    input: float
    other: float
    forward: float
    backward: float
    optimizer: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptProfile:
    """What one rank's steps of a script took, and the gradients in the order in which they were ready.

    `form` says how the script trains: "plain torch", "mt.distribute", "DistributedDataParallel" or "Keras".
    """

    script: str
    form: str
    model: str
    precision: str
    samples: int
    backwards: int
    steps: int
    threads: int
    seconds: PartSeconds
    bucket_bytes: int
    peak_memory_bytes: int
    gradients: tuple[ReadyGradient, ...]

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients."""
        return sum(each.bytes for each in self.gradients)

    @property
    def exchange(self) -> GradientExchange:
        """How the script averages gradients. A script that does not is expected to use `mt.distribute`."""
        return GradientExchange(bucket_bytes=self.bucket_bytes, at_most=self.form != DDP)

    def as_text(self) -> str:
        """Return the file's text, with one line for each gradient."""
        told = asdict(self)
        gradients = told.pop("gradients")
        head = json.dumps({_VERSION: FORMAT, **told}, indent=1).removesuffix("\n}")
        rows = ",\n".join(f"  {json.dumps(each)}" for each in gradients)
        return f'{head},\n "gradients": [\n{rows}\n ]\n}}\n'


def script_profile_of(text: str) -> ScriptProfile:
    """Return the profile in `text`.

    Raises:
        ArgumentError: the text is not a profile. The error names the line and the field.
    """
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"not a profile: {error}; want a file of `multiring profile`") from None
    if not isinstance(table, dict) or _VERSION not in table:
        raise ArgumentError(f'not a profile: no field "{_VERSION}"; want a file of `multiring profile`')
    reading = _Reading(text)
    if table.pop(_VERSION) != FORMAT:
        raise reading.error(_VERSION, f"want {FORMAT}: write the profile anew with this version's `multiring profile`")
    reading.require_table(table, ScriptProfile, "")
    reading.require_table(table["seconds"], PartSeconds, "seconds")
    for name in ("step", "forward", "backward"):
        if not table["seconds"][name]:
            raise reading.error(f"seconds.{name}", "0: want a number above 0")
    rows = table["gradients"]
    if not isinstance(rows, list) or not rows:
        raise reading.error("gradients", "want a list with at least one gradient")
    for number, row in enumerate(rows):
        reading.require_table(row, ReadyGradient, f"gradients[{number}]")
        if number and row["ready_s"] < rows[number - 1]["ready_s"]:
            words = f"{row['ready_s']:g} is before the gradient above: want the order in which they become ready"
            raise reading.error(f"gradients[{number}].ready_s", words)
    gradients = tuple(ReadyGradient(**row) for row in rows)
    return ScriptProfile(**{**table, "seconds": PartSeconds(**table["seconds"]), "gradients": gradients})


class _Reading:
    """Checks fields, and finds the lines of those that are wrong."""

    def __init__(self, text: str) -> None:
        self._text = text

    def error(self, path: str, words: str) -> ArgumentError:
        return ArgumentError(f"line {self._line(path)}, field {path}: {words}")

    def _line(self, path: str) -> int:
        *_, name = path.rpartition(".")
        number = re.search(r"\[(\d+)\]", path)
        begin = max(self._text.find('"gradients"'), 0) if number or path == "gradients" else 0
        skipped = int(number.group(1)) if number else 0
        places = [each.start() for each in re.finditer(rf'"{re.escape(name)}"\s*:', self._text[begin:])]
        at = begin + (places[min(skipped, len(places) - 1)] if places else 0)
        return self._text.count("\n", 0, at) + 1

    def require_table(self, table: Any, kind: type, path: str) -> None:
        """Raise ArgumentError unless `table` has the fields of `kind`, a dataclass: texts, and numbers from 0."""
        types = {each.name: each.type for each in fields(kind)}
        wanted = ", ".join(types)
        if not isinstance(table, Mapping):
            raise self.error(path, f"{table!r}: want an object with {wanted}")
        for name, value in table.items():
            where = f"{path}.{name}" if path else name
            if name not in types:
                raise self.error(where, f"unknown: want {wanted}")
            if types[name] is str and not isinstance(value, str):
                raise self.error(where, f"{value!r}: want text")
            if types[name] is int and (type(value) is not int or value < 1):
                raise self.error(where, f"{value!r}: want a whole number, 1 or more")
            if types[name] is float and not (type(value) in (int, float) and 0 <= value < math.inf):
                raise self.error(where, f"{value!r}: want a number, 0 or more")
        missing = [name for name in types if name not in table]
        if missing:
            raise self.error(path or _VERSION, f"{path or 'the file'} lacks {', '.join(missing)}")


def step_profile_of(
    profiles: Sequence[ScriptProfile],
    ranks: int,
    batch_per_rank: int | None = None,
    exchange: GradientExchange | None = None,
) -> Profile:
    """Return the profile of a step on `ranks` ranks.

    Args:
        profiles: profiles of one script with different batches. Compute is interpolated between them; other parts are
            those of the profile whose batch is nearest.
        ranks: the number of ranks.
        batch_per_rank: the samples of a rank in one step; by default those of the only profile.
        exchange: how gradients are averaged; by default with the script's buckets.

    Raises:
        ArgumentError: the profiles have different gradients or one batch twice, or several profiles come without a
            batch.
    """
    first = profiles[0]
    if batch_per_rank is None and len(profiles) > 1:
        raise ArgumentError(f"{len(profiles)} profiles with different batches: say which batch a rank has")
    batch = first.samples if batch_per_rank is None else batch_per_rank
    if batch < 1:
        raise ArgumentError(f"a batch of {batch}: want 1 or more")
    ordered = sorted(profiles, key=lambda each: each.samples)
    for before, after in pairwise(ordered):
        if before.samples == after.samples or _sizes(before) != _sizes(after):
            raise ArgumentError(
                f"profiles of {before.script!r} with {before.samples} samples and {before.gradient_bytes} bytes of "
                f"gradients, and of {after.script!r} with {after.samples} and {after.gradient_bytes}: want one model "
                "with different batches"
            )
    nearest = min(ordered, key=lambda each: abs(each.samples - batch))
    return Profile(
        units=_units(nearest),
        batch=batch * ranks,
        compute=tuple(Compute(each.samples, each.seconds.forward, each.seconds.backward) for each in ordered),
        overheads=Overheads(
            update_s_per_byte=nearest.seconds.optimizer / nearest.gradient_bytes,
            outside_s=nearest.seconds.input + nearest.seconds.other,
        ),
        exchange=exchange or nearest.exchange,
    )


def _sizes(profile: ScriptProfile) -> list[int]:
    return sorted(each.bytes for each in profile.gradients)


def _units(profile: ScriptProfile) -> tuple[Unit, ...]:
    """Return a unit for each gradient, in the order of forward, and one for the rest of backward."""
    units, before_s = [], 0.0
    for each in profile.gradients:
        units.append(_unit(each.name, each.bytes, each.ready_s - before_s))
        before_s = each.ready_s
    rest_s = max(0.0, profile.seconds.backward - before_s)
    return (_unit("", 0, rest_s), *reversed(units))


def _unit(name: str, size_bytes: int, seconds: float) -> Unit:
    return Unit(
        name=name,
        parameters=int(size_bytes > 0),
        parameter_bytes=size_bytes,
        seconds=seconds,
        output_bytes=0.0,
        saved_bytes=0.0,
    )
