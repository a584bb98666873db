"""accumulate: several batches for a step, in a loop that is written for one."""

from types import TracebackType
from typing import Any

import torch

from multiring.errors import ArgumentError, StateError
from multiring.torch.gradients.distributed import Distributed

_HELD = ("step", "zero_grad")


class Accumulation:
    """Several backwards for a step; see `accumulate`."""

    def __init__(self, optimizer: Any, steps: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(f"optimizer is a {type(optimizer).__name__}; want a torch.optim.Optimizer")
        if not isinstance(steps, int) or steps < 1:
            raise ArgumentError(f"accumulate(optimizer, {steps!r}): want how many batches make a step, 1 or more")
        self._optimizer: torch.optim.Optimizer = optimizer
        self._steps: int = steps
        self._done = 0  # batches of the step that is being made
        self._is_last = False  # the batch is the last of its pass, as the program says
        self._is_within = False
        self._own: dict[str, Any] = {}  # what the optimizer object itself has of what is held
        if isinstance(optimizer, Distributed):
            optimizer.accumulate(steps)

    def __call__(self, *, last: bool) -> "Accumulation":
        """Say whether the next batch is the last of its pass, with which its step is complete, however few it has."""
        self._is_last = last
        if isinstance(self._optimizer, Distributed):
            self._optimizer.reduce_early(early=last)
        return self

    def __enter__(self) -> bool:
        """Return whether the step is complete with this batch; else `step` and `zero_grad` do nothing within."""
        if self._is_within:
            raise StateError("accumulate: `with` within `with`; want one for each batch")
        self._is_within = True
        self._done += 1
        is_last = self._is_last or (isinstance(self._optimizer, Distributed) and self._optimizer.ends_early)
        if self._done < self._steps and not is_last:
            self._own = {name: vars(self._optimizer)[name] for name in _HELD if name in vars(self._optimizer)}
            vars(self._optimizer).update(dict.fromkeys(_HELD, _nothing))
            return False
        self._done = 0
        return True

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._is_within = False
        if vars(self._optimizer).get("step") is _nothing:
            for name in _HELD:
                del vars(self._optimizer)[name]
            vars(self._optimizer).update(self._own)
        if not self._done and self._is_last:
            self(last=False)


def accumulate(optimizer: torch.optim.Optimizer, steps: int) -> Accumulation:
    """Return a context for the work on one batch, of which `steps` make one step of the optimizer.

        accumulated = mt.accumulate(optimizer, 4)
        for inputs, labels in loader:
            with accumulated as completes:
                (loss_of(model(inputs), labels) / 4).backward()
                if completes:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    Within it `step` and `zero_grad` do nothing until the step is complete; gradients add up, and ranks share them once.
    Under `distribute` the last batch of a pass completes its step, however many there were; elsewhere
    `with accumulated(last=number == len(loader)):` says so. Make it before the loop, of the optimizer that that uses.

    Args:
        optimizer: any.
        steps: how many; the same on all ranks.

    Raises:
        ArgumentError: `steps` below 1, or no optimizer.
    """
    return Accumulation(optimizer, steps)


def _nothing(*_arguments: Any, **_keywords: Any) -> None:
    """Stand in for `step` and `zero_grad` where a step is not complete."""
