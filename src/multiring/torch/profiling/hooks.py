"""Hooks in torch that tell a `StepRecorder` what a program does; `record` installs them.

torch has hooks for all modules and for all optimizers, but none for all backwards and loaders, so `record` replaces
`torch.autograd.backward` and the iterators' `__next__`. The process belongs to the profile, so nothing is put back.

This module imports no other module of multiring.torch: it is imported while such a module imports torch.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader

from multiring._simulator.measured_feeding import MeasuredFeeding
from multiring._simulator.script_profile import DDP, ScriptProfile
from multiring._steps.step_counters import STEPS, MadeSamples
from multiring.errors import MultiringError, StateError, UnsupportedError
from multiring.planner.parallelism import GradientExchange
from multiring.torch.profiling.recorder import MeasuredSteps, StepRecorder
from multiring.torch.profiling.worker_times import WorkerTimes

_DISTRIBUTED = "multiring.torch.gradients.distributed"
_PLAIN, _OURS, _KERAS = "plain torch", "mt.distribute", "Keras"
# Ways to train of which the gradients are not averaged bucket by bucket over ranks that have all parameters.
_REFUSED = ("DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine", "PipelineStage")
# By this part, the samples that workers made for a step may differ from those of the model, as at the end of an epoch.
_ALIKE = 0.4


@dataclass(frozen=True, slots=True)
class RecordedScript:
    """What the caller knows of the script: its words, and what to do with the profile and with a refusal.

    `steps` are measured after the warm-up. The script then ends, unless it `goes_on`. `meet` is called at the end of
    the warm-up; it waits for the copies of the script, and `copies` returns how many run, with the script itself.
    """

    words: str
    steps: int
    goes_on: bool
    write: Callable[[ScriptProfile], None]
    refuse: Callable[[str], None]
    meet: Callable[[], None] = lambda: None
    copies: Callable[[], int] = lambda: 1


@dataclass(frozen=True, slots=True)
class _InputMark:
    """What workers had made at some moment, after how many steps, and the processor time of this process.

    The workers are those of multiring's loaders, and those of torch's.
    """

    made: tuple[MadeSamples, ...]
    steps: int
    process_s: float


class StepHooks:
    """The hooks of one process. Only events of the main thread count, but gradients become ready in any thread."""

    def __init__(self, script: RecordedScript) -> None:
        self._script = script
        self._recorder = StepRecorder(script.steps, time.monotonic_ns(), self._complete, self._warmed_up)
        self._outermost: nn.Module | None = None
        self._depth = 0
        self._in_backward = False
        self._loading = 0
        self._loaded_ns = 0  # of torch's loaders since the last forward
        self._input_s = STEPS.input_s  # of multiring's loaders until the last forward
        self._workers = 0  # of torch's newest loader
        self._worker_times = WorkerTimes()
        self._warm: _InputMark | None = None
        self._model: nn.Module | None = None
        self._parameters: dict[Hashable, Tensor] = {}
        self._names: dict[Hashable, str] = {}
        self._form = _PLAIN
        self._bucket_bytes = GradientExchange().bucket_bytes
        self._is_over = False

    def install(self) -> None:
        """Install the hooks and replace what has none."""
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)
        self._replace_backward()
        self._worker_times.install()
        self._replace_next(dataloader._BaseDataLoaderIter)  # noqa: SLF001 -- the iterator of all torch's loaders

    @property
    def _is_off(self) -> bool:
        return self._is_over or threading.current_thread() is not threading.main_thread()

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off:
            return
        if self._outermost is module:
            self._depth += 1
        if self._outermost is not None or not torch.is_grad_enabled() or self._in_backward:
            return
        self._outermost, self._depth = module, 1
        self._model = self._model or module
        self._require_served(module)
        self._count_wait()
        self._recorder.forward(time.monotonic_ns())

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off or self._outermost is not module:
            return
        self._depth -= 1
        if not self._depth:
            self._outermost = None
            # torch does not tell these hooks of arguments by keyword.
            self._recorder.computed(_samples(inputs) or _samples(outputs))

    def _count_wait(self) -> None:
        """Count the waits for input since the last call."""
        # One of two loaders may be inside the other one, so that both have counted one wait.
        loaded_ns, self._loaded_ns = self._loaded_ns, 0
        before_s, self._input_s = self._input_s, STEPS.input_s
        self._recorder.waited(max(loaded_ns, int((self._input_s - before_s) * 1e9)))

    def _warmed_up(self) -> None:
        self._script.meet()
        self._warm = self._input_mark()

    def _input_mark(self) -> _InputMark:
        made = STEPS.made, self._worker_times.made(self._workers)
        return _InputMark(made, self._recorder.steps, time.process_time())

    def _require_served(self, module: nn.Module) -> None:
        kinds = {each.__name__ for each in type(module).__mro__}
        found = next((name for name in _REFUSED if name in kinds), None)
        if found is not None:
            self._refuse(UnsupportedError(f"the model is a {found}, which multiring cannot profile"))
        if DDP in kinds:
            self._form = DDP
            self._bucket_bytes = int(getattr(module, "bucket_bytes_cap", self._bucket_bytes))

    def _replace_backward(self) -> None:
        plain = torch.autograd.backward

        def backward(*arguments: Any, **keywords: Any) -> None:
            if self._is_off or self._in_backward:
                plain(*arguments, **keywords)
                return
            self._call(lambda: self._recorder.backward_begins(time.monotonic_ns()))
            self._in_backward = True
            try:
                plain(*arguments, **keywords)
            finally:
                self._in_backward = False
            self._recorder.backward_ends(time.monotonic_ns())

        torch.autograd.backward = backward

    def _replace_next(self, kind: Any) -> None:
        plain = kind.__next__

        def following(iterator: Any) -> Any:
            if self._is_off or self._loading:
                return plain(iterator)
            began = time.monotonic_ns()
            self._loading += 1
            self._workers = iterator._num_workers  # noqa: SLF001 -- no public name has it
            try:
                return plain(iterator)
            finally:
                self._loading -= 1
                self._loaded_ns += time.monotonic_ns() - began

        kind.__next__ = following

    def _before_update(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        if self._is_off:
            return
        if not self._recorder.steps:
            self.follow([each for group in optimizer.param_groups for each in group["params"]])
            self._see_distributed(optimizer)
        self._recorder.update_begins(time.monotonic_ns())

    def _after_update(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        if not self._is_off:
            self._recorder.update_ends(time.monotonic_ns(), id(optimizer))

    def _see_distributed(self, optimizer: Any) -> None:
        module = sys.modules.get(_DISTRIBUTED)
        if module is not None and isinstance(optimizer, module.Distributed):
            self._form = _OURS
            self._bucket_bytes = module.setup_of(optimizer).options.bucket_bytes

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Note when the gradients of `parameters` become ready, from now on."""
        for each in parameters:
            if id(each) in self._parameters or not each.requires_grad:
                continue
            if each.device.type != "cpu":
                self._refuse(
                    UnsupportedError(
                        f"parameters are on {each.device}: a profile is measured by the host's clock, and devices are "
                        "not built yet; want a model in host memory"
                    )
                )
            if type(each).__name__ == "DTensor":
                self._refuse(UnsupportedError("parameters are DTensors, which multiring cannot profile"))
            self._parameters[id(each)] = each
            each.register_post_accumulate_grad_hook(self._is_ready)  # type: ignore[no-untyped-call]

    def _is_ready(self, parameter: Tensor) -> None:
        if not self._is_over:
            self._recorder.is_ready(id(parameter), time.monotonic_ns())

    def keras_update(self, apply: Callable[..., Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Call `apply`, which is the update of a Keras optimizer."""
        if self._is_off:
            return apply()
        if not self._recorder.steps:
            self._form = _KERAS
            self._names = {id(each.value): each.path for each in variables}
            self.follow([each.value for each in variables])
        self._recorder.update_begins(time.monotonic_ns())
        try:
            return apply()
        finally:
            self._recorder.update_ends(time.monotonic_ns(), id(optimizer))

    def _call(self, event: Callable[[], None]) -> None:
        try:
            event()
        except MultiringError as error:
            self._refuse(error)

    def _refuse(self, error: MultiringError) -> None:
        self._is_over = True
        self._script.refuse(str(error))
        raise SystemExit(0)  # the script did nothing wrong; the command reports the refusal

    def _complete(self) -> None:
        self.finish()
        if not self._script.goes_on:
            raise SystemExit(0)  # the script's `finally` blocks run

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._recorder.steps

    def stop(self) -> None:
        """Record nothing more, and write nothing; for a child process."""
        self._is_over = True

    def finish(self) -> None:
        """Write the profile of the steps so far, unless that was done."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self._script.write(self._profile())
        except MultiringError as error:
            self._script.refuse(str(error))

    def _profile(self) -> ScriptProfile:
        steps = self._recorder.measured()
        if self._model is None:
            raise StateError("the program called no module with gradients enabled: want a forward pass of a module")
        inner = self._model.module if isinstance(self._model, nn.parallel.DistributedDataParallel) else self._model
        model: nn.Module = inner
        names: dict[Hashable, str] = {id(each): name for name, each in model.named_parameters()} | self._names

        def about(key: Hashable) -> tuple[str, int]:
            parameter = self._parameters[key]
            return names.get(key, "parameter"), parameter.numel() * parameter.element_size()

        gradients = tuple(each for each in steps.gradients(about) if each.bytes)
        if not gradients:
            raise StateError("no gradient of the optimizer's parameters became ready in backward")
        if not steps.samples:
            raise StateError("the model's inputs have no tensor with a dimension for samples")
        types = sorted({str(each.dtype).removeprefix("torch.") for each in self._parameters.values()})
        return ScriptProfile(
            script=self._script.words,
            form=self._form,
            # Keras calls no module for the whole model, but begins the path of a variable with its name.
            model=gradients[0].name.split("/")[0] if self._form == _KERAS else type(model).__name__,
            precision=", ".join(types) + (", autocast" if torch.is_autocast_enabled("cpu") else ""),
            samples=steps.samples,
            backwards=steps.backwards,
            steps=steps.steps,
            threads=torch.get_num_threads(),
            seconds=steps.seconds,
            bucket_bytes=self._bucket_bytes,
            peak_memory_bytes=_peak_bytes(),
            gradients=gradients,
            copies=self._script.copies(),
            compute_s=steps.compute_s,
            feeding=None if self._warm is None else _feeding(self._warm, self._input_mark(), steps),
        )


def _feeding(before: _InputMark, after: _InputMark, steps: MeasuredSteps) -> MeasuredFeeding | None:
    """Return what the workers took for a sample; None unless those of one kind of loader made the model's samples."""
    count = after.steps - before.steps
    for made in (end.since(begin) for begin, end in zip(before.made, after.made, strict=True)):
        is_other = abs(made.samples - count * steps.samples) >= _ALIKE * count * steps.samples
        if is_other or made.worker_s <= 0 or made.workers < 1:
            continue
        compute_s = count * (steps.seconds.forward + steps.seconds.backward)
        other_cpu_s = after.process_s - before.process_s - made.process_cpu_s
        return MeasuredFeeding(
            workers=made.workers,
            worker_s=made.worker_s / made.samples,
            cpu_s=made.cpu_s / made.samples,
            compute_cores=max(0.0, other_cpu_s) / compute_s,
        )
    return None


def record(script: RecordedScript) -> StepHooks:
    """Install the hooks, and return the recording, which the caller finishes when the program ends."""
    recording = StepHooks(script)
    recording.install()
    os.register_at_fork(after_in_child=recording.stop)
    return recording


def _samples(values: Any) -> int:
    """Return the first dimension of the first tensor in `values` that has one; 0 without such a tensor."""
    leaves = tree_leaves(values)
    return next((each.shape[0] for each in leaves if isinstance(each, Tensor) and each.dim()), 0)


def _peak_bytes() -> int:
    """Return the most memory that this process has had, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise StateError("/proc/self/status has no line VmHWM, so the peak memory is unknown")
