"""The profile of a user's script on one rank: what `multiring profile` writes, and `multiring simulate` predicts from.

The file is JSON; docs/profile.md describes its fields.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from multiring._simulator.measured_feeding import MeasuredFeeding, feeding_at
from multiring._strict_json import FileFormat, Path, WrongFieldError, require_fields, rows_at
from multiring.errors import ArgumentError
from multiring.planner.parallelism import Compute, Feeding, GradientExchange, Overheads, Profile, Unit

DDP = "DistributedDataParallel"
_FORMAT = FileFormat(
    field="multiring_profile",
    version=1,
    wanted="want a file of `multiring profile`",
    anew="write the profile anew with this version's `multiring profile`",
    refusal="not a profile: ",
)


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
    `input` is the wait for the loaders, and `other` what none of the other parts is. `step` is their sum. `step_low`
    and `step_high` are the quartiles of the step.
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

    `form` says how the script trains: "plain torch", "mt.distribute", "DistributedDataParallel" or "Keras". `copies`
    of the script ran at once on the host while it was measured; they exchanged nothing. `compute_s` has forward and
    backward together of each measured step, in seconds and in the order of the steps; profiles of earlier versions do
    not have it. `feeding` is what the workers of its loader took; None: not known.
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
    copies: int = 1
    compute_s: tuple[float, ...] = ()
    feeding: MeasuredFeeding | None = None

    @property
    def hand_over_s(self) -> float:
        """The part of the measured wait for input, in seconds, that is not a wait for samples that workers still make.

        The rest of the wait depends on the number of workers and on the length of the step, and is predicted. Without
        `feeding`, all of the wait is a wait for samples.
        """
        if self.feeding is None:
            return 0.0
        made_s = self.samples * self.feeding.worker_s / self.feeding.workers
        return max(0.0, self.seconds.input - max(0.0, made_s - (self.seconds.step - self.seconds.input)))

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients."""
        return sum(each.bytes for each in self.gradients)

    @property
    def exchange(self) -> GradientExchange:
        """How the script averages gradients. A script that does not is expected to use `mt.distribute`."""
        return GradientExchange(bucket_bytes=self.bucket_bytes, at_most=self.form != DDP)

    def as_text(self) -> str:
        """Return the file's text, with one line for each gradient, and one for the compute of all steps."""
        told = asdict(self)
        gradients, compute_s = told.pop("gradients"), told.pop("compute_s")
        if self.feeding is None:
            del told["feeding"]
        head = json.dumps({**_FORMAT.head, **told}, indent=1).removesuffix("\n}")
        head += f',\n "compute_s": {json.dumps(compute_s)}' if compute_s else ""
        rows = ",\n".join(f"  {json.dumps(each)}" for each in gradients)
        return f'{head},\n "gradients": [\n{rows}\n ]\n}}\n'


def script_profile_of(text: str) -> ScriptProfile:
    """Return the profile in `text`.

    Raises:
        ArgumentError: the text is not a profile. The error names the line and the field.
    """
    return _FORMAT.read(text, _checked)


def _checked(table: dict[str, Any]) -> ScriptProfile:
    require_fields(table, ScriptProfile, ())
    require_fields(table["seconds"], PartSeconds, ("seconds",))
    for name in ("step", "forward", "backward"):
        if not table["seconds"][name]:
            raise WrongFieldError(("seconds", name), "0: want a number above 0")
    rows = rows_at(table["gradients"], ("gradients",))
    if not rows:
        raise WrongFieldError(("gradients",), "want a list with at least one gradient")
    for number, row in enumerate(rows):
        require_fields(row, ReadyGradient, ("gradients", number))
        if number and row["ready_s"] < rows[number - 1]["ready_s"]:
            words = f"{row['ready_s']:g} is before the gradient above: want the order in which they become ready"
            raise WrongFieldError(("gradients", number, "ready_s"), words)
    if "feeding" in table:
        table["feeding"] = feeding_at(table["feeding"], ("feeding",))
    if "compute_s" in table:
        table["compute_s"] = _compute_of_steps(table)
    gradients = tuple(ReadyGradient(**row) for row in rows)
    return ScriptProfile(**{**table, "seconds": PartSeconds(**table["seconds"]), "gradients": gradients})


def _compute_of_steps(table: dict[str, Any]) -> tuple[float, ...]:
    path: Path = ("compute_s",)
    found = rows_at(table["compute_s"], path)
    if len(found) != table["steps"]:
        raise WrongFieldError(path, f"{len(found)} numbers: want one for each of the {table['steps']} measured steps")
    for number, each in enumerate(found):
        if type(each) not in (int, float) or each <= 0:
            raise WrongFieldError((*path, number), f"{json.dumps(each)}: want a number above 0")
    return tuple(map(float, found))


def step_profile_of(
    profiles: Sequence[ScriptProfile],
    ranks: int,
    batch_per_rank: int | None = None,
    exchange: GradientExchange | None = None,
    feeding: Feeding | None = None,
) -> Profile:
    """Return the profile of a step on `ranks` ranks.

    Args:
        profiles: profiles of one script with different batches. Compute is interpolated between them; other parts are
            those of the profile whose batch is nearest.
        ranks: the number of ranks.
        batch_per_rank: the samples of a rank in one step; by default those of the only profile.
        exchange: how gradients are averaged; by default with the script's buckets.
        feeding: how samples are made, in place of the measured wait for them.

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
            outside_s=nearest.seconds.other + (nearest.seconds.input if feeding is None else nearest.hand_over_s),
        ),
        exchange=exchange or nearest.exchange,
        spread=_spread(nearest),
        feeding=None if feeding is None else replace(feeding, hand_over_s=nearest.hand_over_s),
    )


def _spread(profile: ScriptProfile) -> tuple[float, ...]:
    """Return the compute of each measured step, divided by their median."""
    middle = median(profile.compute_s) if profile.compute_s else 1.0
    return tuple(each / middle for each in profile.compute_s)


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
