"""The training loop that both programs share, from the options to the last checkpoint.

In each step, a rank computes its part of a batch in micro-batches. The loss of each micro-batch is a sum divided by the
number of samples of all ranks. So the sum of all ranks' gradients is the batch's gradient, even for uneven parts. Then
the optimizer takes its step, and the recipe's stages around it unscale, clip, delay and average. One small sum stays
in flight until the next step. By it ranks agree on the loss, on whether it is finite, and on requests to stop.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import multiring.torch as mt
from multiring.data import Loader
from multiring.data.dataset import Samples
from multiring.errors import StateError
from multiring.training import options as options_file
from multiring.training.checkpoints import Checkpoints
from multiring.training.circumstances import circumstances
from multiring.training.evaluation import combine_batch_norm_statistics, evaluate
from multiring.training.options import TrainingOptions
from multiring.training.recipe import build_recipe, steps_per_epoch
from multiring.training.report import BASELINES, METRICS, RESULT

Batch = dict[str, Any]
Callback = Callable[[dict[str, Any]], None]


class TrainingTask(Protocol):
    """The interface of a program's task."""

    name: str
    about: str  # a sentence on the data, and on conclusions that they do not allow

    @property
    def training(self) -> Samples:
        """The training set."""
        ...

    @property
    def evaluations(self) -> Mapping[str, Samples]:
        """The evaluation sets by name; the first one decides which checkpoint is best. It may be empty."""
        ...

    def model(self) -> nn.Module:
        """Return the network, initialised from torch's generator."""
        ...

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each sample, (n,)."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run forward once; return each sample's loss, (n,), and int64 counts that add up over samples."""
        ...

    def scores(self, counts: Tensor) -> dict[str, float]:
        """Return the scores of a data set's counts, in percent; the first score decides which checkpoint is best."""
        ...

    def intervals(self, counts: Tensor) -> dict[str, tuple[float, float]]:
        """Return the 95 % intervals of some scores over the samples of the data set, in percent."""
        ...

    def chance(self, counts: Tensor) -> dict[str, float]:
        """Return some scores of a guess without learning, in percent."""
        ...


@dataclass(slots=True)
class TrainingProgress:
    """The progress and the latest results of a run."""

    step: int = 0
    best: float = -math.inf
    trained_s: float = 0.0  # without evaluation and checkpoints
    waited_s: float = 0.0  # the part of trained_s that was spent waiting for data
    wall_s: float = 0.0  # with evaluation and checkpoints, over all processes of this run
    samples: int = 0  # of all ranks, since this process began
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)  # by evaluation set
    counts: dict[str, Tensor] = field(default_factory=dict)  # from which scores are computed


class TrainingRun:
    """A training, from its options to its end.

    Args:
        task: the task to train.
        options: the options of the run.
        callbacks: called on rank 0 with each record of the metrics, for example by a tracker of experiments.
    """

    def __init__(self, task: TrainingTask, options: TrainingOptions, callbacks: Sequence[Callback] = ()) -> None:
        self.task, self.options = task, options
        self.folder = Path(options.run)
        if not options.plain:
            mt.init()
        self.rank, self.ranks = (0, 1) if options.plain else (mt.rank(), mt.size())
        torch.manual_seed(options.seed)  # equal on all ranks, so that initial models are equal
        if options.deterministic:
            torch.use_deterministic_algorithms(mode=True)
        self.model = task.model()
        if options.precision == "float64":
            self.model.double()
        part = -(-options.batch // self.ranks)
        self.passes = -(-part // options.micro_batch) if options.micro_batch else 1
        steps = steps_per_epoch(task.training.order.length, options.batch)
        self.total_steps = steps * options.epochs
        self.recipe = build_recipe(options, self.model, steps, self.passes)
        self.loader = Loader(task.training, options.batch, rank=self.rank, ranks=self.ranks, workers=options.workers)
        self.progress = TrainingProgress()
        self._evaluate_steps = max(1, round(options.evaluate_every * steps))
        self._callbacks = [self._write, *callbacks] if self.rank == 0 else []
        self._asked_to_stop = False
        self._report: Any = None
        self._balance: Any = None
        self._in_flight: tuple[Any, Tensor] | None = None
        self._began = time.monotonic()  # excludes breaks between this run's processes

    def train(self) -> TrainingProgress:
        """Train to the last epoch or minute; resume if the folder holds a checkpoint.

        Raises:
            StateError: on every rank: the loss is not finite. The message names the step and the rank. The last
                checkpoint is unchanged.
        """
        checkpoints = None if self.options.plain else Checkpoints(self.folder, self.options.keep)
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            options_file.write(self.options, self.folder)
        if checkpoints is not None:
            self._restore(checkpoints.resume(self.model, self.recipe, self.loader))
            if self.rank == 0:
                _forget_after(self.progress.step, self.folder / METRICS)
            if self.progress.step == 0:
                mt.broadcast_parameters(self.model.state_dict(), root_rank=0)
        if self.options.peak and not self.options.plain and self.options.precision != "float64":
            few = _collated([self.task.training.sample(number) for number in range(2)])
            dtype = self.options.precision
            self._report = mt.training_report(
                self.model, lambda plain: self.task.losses(plain, few).sum(), samples=2, dtype=dtype
            )
        self._balance = mt.measure_bottleneck(self.loader)
        self._began = time.monotonic() - self.progress.wall_s
        with self._listening():
            stopped = self._epochs(checkpoints)
        self._settled()
        if not stopped:
            self.recipe.lag.flush()
            self._evaluate(checkpoints)
        if checkpoints is not None:
            self._save(checkpoints)
        return self.progress

    def _epochs(self, checkpoints: Checkpoints | None) -> bool:
        """Train the remaining steps; return whether the run was asked to stop before the end."""
        progress, options = self.progress, self.options
        while progress.step < self.total_steps:
            batches = iter(self.loader)
            for _ in range(len(self.loader)):
                began = time.monotonic()
                batch = next(batches)
                progress.waited_s += time.monotonic() - began
                own_loss = self._step(batch)
                progress.step += 1
                progress.samples += self.loader.share.total
                if self._report is not None:
                    self._report.count(self.loader.share.samples)
                progress.trained_s += time.monotonic() - began
                evaluates = progress.step % self._evaluate_steps == 0 and progress.step < self.total_steps
                saves = progress.step % options.save_every == 0
                stops = self._agree(own_loss)
                if not stops and (evaluates or saves):
                    stops = self._settled()
                if stops:
                    return stops == "asked"
                if evaluates:
                    self._evaluate(checkpoints)
                if saves and checkpoints is not None:
                    self._save(checkpoints)
        return False

    def _step(self, batch: Batch) -> float:
        """Train on this rank's part of a batch; return its part of the batch's loss."""
        share, recipe = self.loader.share, self.recipe
        whole = 0.0
        recipe.optimizer.zero_grad()
        for part in _parts(batch, share.samples, self.passes):
            with recipe.precision.autocast():
                loss = self.task.losses(self.model, part).sum() / share.total
            recipe.precision.backward(loss)
            whole += float(loss.detach())
        recipe.optimizer.step()
        return whole

    def _agree(self, own_loss: float) -> str:
        """Start to sum the loss over ranks; return a reason to stop, found by the sum of the step before, or ""."""
        minutes = self.options.minutes
        is_over = bool(minutes) and self.progress.trained_s > minutes * 60
        own = torch.tensor([own_loss, float(self._asked_to_stop), float(is_over)], dtype=torch.float64)
        if self.options.plain:
            return self._agreed(own, self.progress.step)
        before = None if self._in_flight is None else (mt.synchronize(self._in_flight[0]), self._in_flight[1])
        self._in_flight = mt.allreduce_async(own, op=mt.Sum, name="loop"), own
        return "" if before is None else self._agreed(before[0], self.progress.step - 1, before[1])

    def _settled(self) -> str:
        """Wait for the sum in flight, so that a checkpoint has all metrics; return a reason to stop, or ""."""
        if self._in_flight is None:
            return ""
        handle, own = self._in_flight
        self._in_flight = None
        return self._agreed(mt.synchronize(handle), self.progress.step, own)

    def _agreed(self, summed: Tensor, step: int, own: Tensor | None = None) -> str:
        loss, asked, is_over = summed.tolist()
        if not math.isfinite(loss):
            told = [own_loss := float((summed if own is None else own)[0])]
            if not self.options.plain:
                told = mt.allgather_object(own_loss, name="not finite")
            bad = next(number for number, each in enumerate(told) if not math.isfinite(each))
            raise StateError(
                f"step {step}: the loss of rank {bad} is {told[bad]}; the last checkpoint in {self.folder} is "
                "unchanged. Resume from it with a lower learning rate, or with clipping"
            )
        if step % self.options.log_every == 0:
            self._log(step, loss)
        return "asked" if asked else "time" if is_over else ""

    def _log(self, step: int, loss: float) -> None:
        progress = self.progress
        seconds = max(progress.trained_s, 1e-9)
        self._record(
            kind="step",
            step=step,
            wall_s=self._wall_s(),
            loss=loss,
            rate=self.recipe.optimizer.param_groups[0]["lr"],
            samples_a_second=progress.samples / seconds,
            waited=progress.waited_s / seconds,
        )

    def _evaluate(self, checkpoints: Checkpoints | None) -> None:
        """Score every evaluation set on all ranks; if the scores are the best so far, save a checkpoint."""
        if self.task.evaluations:
            with self._paused():
                self._score(checkpoints)

    def _score(self, checkpoints: Checkpoints | None) -> None:
        combine_batch_norm_statistics(self.model, self.ranks, self.recipe.average)
        began = time.monotonic()
        for name, samples in self.task.evaluations.items():
            found = evaluate(
                self.model,
                samples,
                self.task.measure,
                batch=self.options.batch,
                place=(self.rank, self.ranks),
                recipe=self.recipe,
                workers=self.options.workers,
            )
            self.progress.counts[name], self.progress.losses[name] = found.counts, found.loss
            self.progress.scores[name] = self.task.scores(found.counts)
        progress = self.progress
        self._record(
            kind="evaluation",
            step=progress.step,
            wall_s=self._wall_s(),
            seconds=time.monotonic() - began,
            intervals=_by_name({name: self.task.intervals(counts) for name, counts in progress.counts.items()}),
            **{f"{name} loss": loss for name, loss in progress.losses.items()},
            **_by_name(progress.scores),
        )
        first = next(iter(self.progress.scores.values()))
        score = next(iter(first.values()))
        if score > self.progress.best:
            self.progress.best = score
            if checkpoints is not None:
                checkpoints.save_best(self.progress.step, self.model, self.recipe, self.loader, **self._saved_values())

    def _save(self, checkpoints: Checkpoints) -> None:
        with self._paused():
            combine_batch_norm_statistics(self.model, self.ranks, self.recipe.average)
            checkpoints.save(self.progress.step, self.model, self.recipe, self.loader, **self._saved_values())

    def _paused(self) -> AbstractContextManager[Any]:
        """Return a context whose time does not count as training."""
        paused = ExitStack()
        for each in (self._report, self._balance):
            if each is not None:
                paused.enter_context(each.paused())
        return paused

    def reached(self) -> dict[str, Any]:
        """Return the report's figures on speed, share of peak, and batch size; every rank calls it."""
        progress, noise = self.progress, self.recipe.noise
        seconds = max(progress.trained_s, 1e-9)
        found: dict[str, Any] = {
            "step": {
                "steps": progress.step,
                "seconds of training": progress.trained_s,
                "of that waiting for data, %": 100 * progress.waited_s / seconds,
            }
        }
        if self._report is not None and progress.samples:
            found["peak"] = str(self._report.finish()).splitlines()
        if self._balance is not None and progress.samples:
            balance = self._balance.finish()
            found["balance"] = [str(balance)]
            found["step"]["exposed communication, ms a step"] = 1e3 * balance.step_s * balance.shares["wire"]
        if noise is not None:
            found["advice"] = [noise.report()]
        return found

    def result(self) -> dict[str, Any]:
        """Return the report's facts on where the run was made, and the scores to compare with."""
        chance = {name: self.task.chance(counts) for name, counts in self.progress.counts.items()}
        return {
            "circumstances": circumstances(self.ranks),
            "chance": _by_name(chance),
            "baselines": baselines_in(Path(self.options.data)),
        }

    def _wall_s(self) -> float:
        self.progress.wall_s = time.monotonic() - self._began
        return self.progress.wall_s

    def _saved_values(self) -> dict[str, Any]:
        progress = self.progress
        times = {"trained_s": progress.trained_s, "waited_s": progress.waited_s, "wall_s": self._wall_s()}
        return {"best": progress.best, **times}

    def _restore(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.progress, name, value)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Handle SIGTERM, so that all ranks save after the same step and end."""

        def ask(_number: int, _frame: object) -> None:
            self._asked_to_stop = True

        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _record(self, **record: Any) -> None:
        for callback in self._callbacks:
            callback(record)

    def _write(self, record: dict[str, Any]) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        figures = ", ".join(f"{k} {v:.4g}" for k, v in record.items() if isinstance(v, float))
        mt.print_once(f"{record['kind']} at step {record['step']}/{self.total_steps}: {figures}")


def _parts(batch: Batch, samples: int, passes: int) -> Iterator[Batch]:
    """Yield a batch in micro-batches of similar size; nothing if the rank has no samples."""
    for number in range(min(passes, samples)):
        chosen = slice(number * samples // min(passes, samples), (number + 1) * samples // min(passes, samples))
        yield {name: value[chosen] for name, value in batch.items()}


def _by_name(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Flatten the rows of data sets: the key of a value becomes "DATA SET KEY"."""
    return {f"{name} {key}": value for name, row in rows.items() for key, value in row.items()}


def baselines_in(folder: Path) -> dict[str, dict[str, float]]:
    """Return the scores that `baselines` wrote beside the data, by method; {} if there are none."""
    path = folder / BASELINES
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _collated(records: Sequence[dict[str, Any]]) -> Batch:
    """Return records as a batch, without fields that are not numbers."""
    return {
        name: np.stack([record[name] for record in records])
        for name, value in records[0].items()
        if isinstance(value, np.ndarray | int | float)
    }


def _forget_after(step: int, metrics: Path) -> None:
    """Remove the metrics after `step`: a killed run wrote them after its last checkpoint, and will write them again."""
    if not metrics.exists():
        return
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    beside = metrics.with_suffix(".beside")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(metrics)


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of a network's weights, which its input must have."""
    return next(model.parameters()).dtype


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write the results that the report shows beside the curves."""
    (folder / RESULT).write_text(json.dumps(result, indent=1), encoding="utf-8")
