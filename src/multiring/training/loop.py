"""The training loop, from the options to the last checkpoint.

In each step, a rank computes its part of a batch in micro-batches. The loss of each micro-batch is a sum divided by the
number of samples of all ranks. So the sum of all ranks' gradients is the batch's gradient, even for uneven parts. Then
the optimizer takes its step, and the recipe's stages around it unscale, clip, delay and average. One small sum stays
in flight until the next step. By it ranks agree on the loss, on whether it is finite, and on requests to stop.
"""

import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import multiring.torch as mt
from multiring._arguments import is_of, shown
from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.process_sets import global_process_set, members_of
from multiring._steps.step_counters import STEPS, log_metrics
from multiring.data import Loader
from multiring.errors import ArgumentError, StateError
from multiring.training import options as options_file
from multiring.training.checkpoints import Checkpoints
from multiring.training.circumstances import circumstances
from multiring.training.devices import device_of, placed
from multiring.training.evaluation import combine_batch_norm_statistics, evaluate, per_sample
from multiring.training.micro_batches import micro_batches, require_equal_passes
from multiring.training.options import TrainingOptions
from multiring.training.progress import TrainingClock, TrainingProgress
from multiring.training.recipe import build_recipe, steps_per_epoch
from multiring.training.run_folder import (
    METRICS,
    claim,
    discard_metrics_after,
    read_baselines,
    write_report,
    write_result,
)
from multiring.training.speed_figures import speed_figures
from multiring.training.task import Batch, TrainingTask

Callback = Callable[[dict[str, Any]], None]
_OF_EACH_RANK = ("data", "run", "device", "workers")  # options that may differ between hosts


@contextmanager
def _claimed(folder: Path, *, alone: bool) -> Iterator[None]:
    """Keep a run's folder for this training; if another one has it, all ranks raise an error."""
    with ExitStack() as stack:
        with nullcontext(True) if alone else mt.on_first_rank() as is_first:
            if is_first:
                stack.enter_context(claim(folder))
        yield


class TrainingRun:
    """A training, from its options to its report. It calls `multiring.torch.init` unless `options.plain` is set.

    Args:
        task: the task to train.
        options: the options of the run; equal on all ranks, except the paths, the device and the workers.
        callbacks: called on rank 0 with each record of the metrics, for example by a tracker of experiments.

    Raises:
        ArgumentError: an argument is of another kind, or a rank would wait for others without end.
        MismatchError: on every rank: the ranks have other options or other data sets.

    Attributes:
        device: the device on which this rank trains.
        model: the network.
        folder: the run's folder.
        rank: this rank.
        ranks: the number of ranks.
        progress: the progress and the latest results.
    """

    def __init__(self, task: TrainingTask, options: TrainingOptions, callbacks: Sequence[Callback] = ()) -> None:
        if not is_of(task, TrainingTask) or not is_of(options, TrainingOptions):
            raise ArgumentError(f"TrainingRun({shown(task)}, {shown(options)}): want a TrainingTask and its options")
        self.task, self.options = task, options
        self.folder = Path(options.run)
        if not options.plain:
            mt.init()
            _require_alike(task, options)
        self.rank, self.ranks = (0, 1) if options.plain else (mt.rank(), mt.size())
        torch.manual_seed(options.seed)  # equal on all ranks, so that initial models are equal
        if options.deterministic:
            torch.use_deterministic_algorithms(mode=True)
        self.device = device_of(options.device, plain=options.plain)
        self.model = task.model()  # on the host, so that it is the same on any device
        if options.precision == "float64":
            self.model.double()
        self.model.to(self.device)
        part = -(-options.batch // self.ranks)
        self.passes = -(-part // options.micro_batch) if options.micro_batch else 1
        samples = task.training.order.length
        require_equal_passes(self.model, batch=options.batch, samples=samples, ranks=self.ranks, passes=self.passes)
        steps = steps_per_epoch(samples, options.batch)
        self.total_steps = steps * options.epochs
        self.recipe = build_recipe(options, self.model, steps, self.passes)
        self.loader = Loader(task.training, options.batch, rank=self.rank, ranks=self.ranks, workers=options.workers)
        self.progress = TrainingProgress()
        self._evaluate_steps = max(1, round(options.evaluate_every * steps))
        self._callbacks = [self._write, *callbacks] if self.rank == 0 else []
        self._asked_to_stop = False
        self._rate = 0.0  # of the last step
        self._report: Any = None
        self._balance: Any = None
        self._in_flight: tuple[Any, Tensor] | None = None
        self._clock = TrainingClock(self.progress)
        self._first_step = 0  # of this process

    def train(self) -> TrainingProgress:
        """Train to the last epoch or minute; resume if the folder holds a checkpoint.

        Raises:
            StateError: on every rank: the loss is not finite. The message names the step and the rank. The last
                checkpoint is unchanged.
            ArgumentError: another process trains in the folder, it has files that are not a run's, its checkpoint has
                another model, batch size, data set or evaluation set, or the task returned losses of a wrong shape.
        """
        checkpoints = None if self.options.plain else Checkpoints(self.folder, self.options.keep)
        with _claimed(self.folder, alone=checkpoints is None):
            return self._train(checkpoints)

    def _train(self, checkpoints: Checkpoints | None) -> TrainingProgress:
        if checkpoints is not None:
            self._restore(checkpoints.resume(self.model, self.recipe, self.loader))
            if self.progress.step == 0:
                mt.broadcast_parameters(self.model.state_dict(), root_rank=0)
        with nullcontext(True) if checkpoints is None else mt.on_first_rank() as is_first:
            if is_first:
                options_file.write(self.options, self.folder)
                discard_metrics_after(self.progress.step, self.folder / METRICS)
                (self.folder / METRICS).touch()  # the report reads it, also of a run too short to log a step
        if self.device.type == "cpu":  # by the host's clock, which does not see a GPU's work
            self._report = _report_of_peak(self.task, self.model, self.options)
            self._balance = mt.measure_bottleneck(self.loader)
        self._clock.start()
        with _at_sigterm(self._ask_to_stop):  # all ranks save after the same step, and end
            stopped = self._epochs(checkpoints)
        self._settled()
        self._clock.count()
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
                self._clock.count()
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

    def _step(self, batch: Batch) -> Tensor:
        """Train on this rank's part of a batch; return its part of the batch's loss, float64 on the device."""
        share, recipe = self.loader.share, self.recipe
        whole = torch.zeros((), dtype=torch.float64, device=self.device)
        recipe.optimizer.zero_grad()
        for part in micro_batches(placed(batch, self.device), share.samples, self.passes):
            with recipe.precision.autocast():
                loss = per_sample(self.task.losses(self.model, part), part).sum() / share.total
            recipe.precision.backward(loss)
            whole += loss.detach()
        self._rate = recipe.optimizer.param_groups[0]["lr"]
        recipe.optimizer.step()
        return whole

    def _agree(self, own_loss: Tensor) -> str:
        """Start to sum the loss over ranks; return a reason to stop, found by the sum of the step before, or ""."""
        minutes = self.options.minutes
        is_over = bool(minutes) and self.progress.trained_s > minutes * 60
        # On a GPU, the host does not wait for the loss before the next step has started.
        others = [torch.full_like(own_loss, each) for each in (self._asked_to_stop, is_over, self._rate)]
        own = torch.stack([own_loss, *others])
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
        own = summed if own is None else own
        loss, asked, is_over, _ = summed.tolist()
        if not math.isfinite(loss):
            told = [own_loss := float(own[0])]
            if not self.options.plain:
                told = mt.allgather_object(own_loss, name="not finite")
            bad = next(number for number, each in enumerate(told) if not math.isfinite(each))
            raise StateError(
                f"step {step}: the loss of rank {bad} is {told[bad]}; the last checkpoint in {self.folder} is "
                "unchanged. Resume from it with a lower learning rate, or with clipping"
            )
        log_metrics(step, loss=loss, learning_rate=float(own[3]))
        if step % self.options.log_every == 0:
            self._log(step, loss, float(own[3]))
        return "asked" if asked else "time" if is_over else ""

    def _log(self, step: int, loss: float, rate: float) -> None:
        progress = self.progress
        seconds = max(progress.trained_s, 1e-9)
        self._record(
            kind="step",
            step=step,
            wall_s=self._clock.wall_s(),
            loss=loss,
            rate=rate,
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
            wall_s=self._clock.wall_s(),
            seconds=time.monotonic() - began,
            intervals=_by_name({name: self.task.intervals(counts) for name, counts in progress.counts.items()}),
            **{f"{name} loss": loss for name, loss in progress.losses.items()},
            **_by_name(progress.scores),
        )
        name, first = next(iter(progress.scores.items()))
        score = next(iter(first.values()), -progress.losses[name])
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
        self._clock.count()
        paused = ExitStack()
        paused.callback(self._clock.go_on)
        paused.callback(STEPS.begin_window)
        for each in (self._report, self._balance):
            if each is not None:
                paused.enter_context(each.paused())
        return paused

    def write_report(self, scores: Sequence[str] = (), **shown: Any) -> Path | None:
        """Write result.json and report.html into the run's folder after `train`; every rank calls it.

        Args:
            scores: the names of the scores in the headline; by default all.
            shown: additional parts of the report: `model`, a name; `classes`, a list of pairs of a class and its scores
                by name; `confusion`, rows of counts by true class and guess.

        Returns:
            The report's path on rank 0, and None on the other ranks.

        Raises:
            UnsupportedError: matplotlib is missing. result.json is written; the message says how to write the report.
        """
        has_trained = self.progress.step > self._first_step
        reached = speed_figures(
            self.progress,
            self.recipe.noise,
            self._report if has_trained else None,
            self._balance if has_trained else None,
        )
        if self.rank:
            return None
        progress, task = self.progress, self.task
        rows = progress.scores if any(progress.scores.values()) else {}
        chosen = {name: [key for key in row if not scores or key in scores] for name, row in rows.items()}
        headline: dict[str, Any] = {f"{name}, {key}, %": rows[name][key] for name in chosen for key in chosen[name]}
        if not rows:
            headline = {f"{name}, loss, {task.loss_unit}": loss for name, loss in progress.losses.items()}
        headline["samples a second"] = progress.samples / max(progress.trained_s, 1e-9)
        headline["ranks"] = self.ranks
        found = {name: task.intervals(counts) for name, counts in progress.counts.items()}
        result = {
            "program": task.name,
            "about": task.about,
            "loss_unit": task.loss_unit,
            **shown,
            "circumstances": circumstances(self.ranks, self.device),
            "chance": _by_name({name: task.chance(counts) for name, counts in progress.counts.items()}),
            "baselines": read_baselines(self.options.data),
            **reached,
            "headline": headline,
            "intervals": {
                f"{name}, {key}, %": found[name][key] for name in chosen for key in chosen[name] if key in found[name]
            },
        }
        write_result(self.folder, result)
        path = write_report(self.folder)
        mt.print_once(path)
        return path

    def _saved_values(self) -> dict[str, Any]:
        progress = self.progress
        times = {"trained_s": progress.trained_s, "waited_s": progress.waited_s, "wall_s": self._clock.wall_s()}
        return {"best": progress.best, "batch": self.options.batch, "scored": _scored_sets(self.task), **times}

    def _restore(self, values: dict[str, Any]) -> None:
        if (batch := values.pop("batch", self.options.batch)) != self.options.batch:
            raise ArgumentError(
                f"batch={self.options.batch}, but the checkpoint in {self.folder} was trained with batch={batch}: want "
                "the same batch, or another folder"
            )
        _require_scored(self.task, values.pop("scored", {}), self.folder)
        for name, value in values.items():
            setattr(self.progress, name, value)
        self._first_step = self.progress.step
        read = self.loader.state_dict()
        self.progress.samples = read["epoch"] * self.task.training.order.length + read["samples"]

    def _ask_to_stop(self) -> None:
        self._asked_to_stop = True

    def _record(self, **record: Any) -> None:
        for callback in self._callbacks:
            callback(record)

    def _write(self, record: dict[str, Any]) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        figures = ", ".join(f"{k} {v:.4g}" for k, v in record.items() if isinstance(v, float))
        mt.print_once(f"{record['kind']} at step {record['step']}/{self.total_steps}: {figures}")


def _require_alike(task: TrainingTask, options: TrainingOptions) -> None:
    """Raise MismatchError on every rank if the ranks' options or data sets differ.

    With another batch size, for example, ranks would take other numbers of steps, and wait for each other at the end.
    """
    group = members_of(global_process_set).group
    with reporting_errors(group, "TrainingRun"):
        if not hasattr(task, "training"):
            raise ArgumentError(f"{type(task).__name__} has no attribute `training`: want the training set")
        sets = {"training": task.training, **task.evaluations}
        lines = [
            f"{name}={value!r}" for name, value in dataclasses.asdict(options).items() if name not in _OF_EACH_RANK
        ]
        lines += [f"data set {name!r}: {each.digest}, its order {each.order.digest}" for name, each in sets.items()]
    require_alike(group, "TrainingRun", lines)


@contextmanager
def _at_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """Call a function at SIGTERM, in place of the end of the process."""
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report_of_peak(task: TrainingTask, model: Any, options: TrainingOptions) -> Any:
    """Start to measure the share of this machine's peak; return None if the run does not."""
    if not options.peak or options.plain or options.precision == "float64":
        return None
    few = _collated([task.training.sample(number) for number in range(2)])
    return mt.training_report(model, lambda plain: task.losses(plain, few).sum(), samples=2, dtype=options.precision)


def _scored_sets(task: TrainingTask) -> dict[str, str]:
    """Return the digests of the evaluation sets, on which the best score depends."""
    return {name: samples.digest for name, samples in task.evaluations.items()}


def _require_scored(task: TrainingTask, scored: Mapping[str, str], folder: Path) -> None:
    """Raise ArgumentError if an evaluation set is not the one that a checkpoint was scored on."""
    for name, digest in _scored_sets(task).items():
        if scored.get(name, digest) != digest:
            raise ArgumentError(
                f"evaluation set {name!r} is not the one that the checkpoint in {folder} was scored on, so that its "
                "best score means nothing now: want the same samples and labels, or another folder"
            )


def _by_name(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Flatten the rows of data sets: the key of a value becomes "DATA SET KEY"."""
    return {f"{name} {key}": value for name, row in rows.items() for key, value in row.items()}


def _collated(records: Sequence[dict[str, Any]]) -> Batch:
    """Return records as a batch, without fields that are not numbers."""
    return {
        name: np.stack([record[name] for record in records])
        for name, value in records[0].items()
        if isinstance(value, np.ndarray | np.number | np.bool_ | int | float)
    }
