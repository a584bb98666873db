"""accumulate: use several batches for each step, in a loop written for one batch a step."""

from typing import Any

import torch

from multiring._arguments import require_whole
from multiring.errors import ArgumentError, StateError
from multiring.torch.gradients.distributed import Distributed

_HELD = ("step", "zero_grad")


class GradientAccumulation:
    """A context that makes one optimizer step from several batches; see `accumulate`."""

    def __init__(self, optimizer: Any, steps: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(f"optimizer is a {type(optimizer).__name__}; want a torch.optim.Optimizer")
        self._optimizer: torch.optim.Optimizer = optimizer
        self._steps = steps = require_whole(
            "accumulate: steps", steps, 1, wanted="the number of batches a step, 1 or more"
        )
        self._done = 0  # the number of batches in the current step
        self._is_last = False  # the program says that the batch is the last of its pass
        self._is_within = False
        self._own: dict[str, Any] = {}  # the optimizer's own instance attributes that `_nothing` replaces
        if isinstance(optimizer, Distributed):
            optimizer.accumulate(steps)

    def __call__(self, *, last: bool) -> "GradientAccumulation":
        """Set whether the next batch is the last of its pass. The last batch completes the step in any case."""
        self._is_last = last
        if isinstance(self._optimizer, Distributed):
            self._optimizer.reduce_early(early=last)
        return self

    def __enter__(self) -> bool:
        """Return whether this batch completes the step; otherwise disable `step` and `zero_grad` in the context."""
        if self._is_within:
            raise StateError("accumulate: the `with` blocks of two batches are nested; use one `with` for each batch")
        self._is_within = True
        self._done += 1
        is_last = self._is_last or (isinstance(self._optimizer, Distributed) and self._optimizer.ends_early)
        if self._done < self._steps and not is_last:
            self._own = {name: vars(self._optimizer)[name] for name in _HELD if name in vars(self._optimizer)}
            vars(self._optimizer).update(dict.fromkeys(_HELD, _nothing))
            return False
        self._done = 0
        return True

    def __exit__(self, *_: object) -> None:
        self._is_within = False
        if vars(self._optimizer).get("step") is _nothing:
            for name in _HELD:
                del vars(self._optimizer)[name]
            vars(self._optimizer).update(self._own)
        if not self._done and self._is_last:
            self(last=False)


def accumulate(optimizer: torch.optim.Optimizer, steps: int) -> GradientAccumulation:
    """Return a context for one batch; `steps` batches make one step of the optimizer.

        accumulated = mt.accumulate(optimizer, 4)
        for inputs, labels in loader:
            with accumulated as completes:
                (loss_of(model(inputs), labels) / 4).backward()
                if completes:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    In the context, `step` and `zero_grad` do nothing until the step is complete. The gradients add up, and the ranks
    share them once. Under `distribute`, the last batch of a pass always completes a step. In other loops, mark the last
    batch by `with accumulated(last=number == len(loader)):`. Create the context before the loop, with the optimizer
    that the loop uses.

    Args:
        optimizer: any optimizer.
        steps: the number of batches per step; the same on all ranks.

    Raises:
        ArgumentError: `steps` is below 1, or `optimizer` is not an optimizer.
    """
    return GradientAccumulation(optimizer, steps)


def _nothing(*_arguments: Any, **_keywords: Any) -> None:
    """Replace `step` and `zero_grad` while a step is not complete."""
