"""The options of an optimizer, such as its learning rate, which must stay equal on all ranks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring._frontend.lifecycle import size
from multiring._frontend.object_collectives import allgather_object
from multiring._runtime.group.handles import told_apart
from multiring.errors import MismatchError
from multiring.torch.collectives.allgather import allgather
from multiring.torch.distributing.fingerprints import fingerprint

Options = dict[str, str]


class AgreedOptions:
    """Compares the options of an optimizer among the ranks, once a pass.

    Ranks whose options differ from the beginning may mean it, for example if they hold different parts of a model. So
    only options that were equal before must stay equal, each by itself.

    Args:
        optimizer: the optimizer of this rank.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._apart: frozenset[str] | None = None  # the names of options that may differ; None: nothing was compared

    def require_equal(self) -> None:
        """Compare the options; every rank must call it.

        Raises:
            MismatchError: one differs, and was equal at an earlier call. Every rank raises it.
        """
        if size() == 1:
            return
        own = _options_of(self._optimizer)
        apart = self._apart or frozenset()
        alike = {name: text for name, text in own.items() if name not in apart}
        told = allgather(torch.tensor([fingerprint(repr(alike))], device="cpu"), name="distribute.options")
        if len(set(told.tolist())) == 1:
            self._apart = apart
        else:  # on all ranks, also if one has just joined the job and does not know which options may differ
            self._apart = _agreed(allgather_object((own, self._apart), name="distribute.options_apart"))


def _agreed(told: Sequence[tuple[Options, frozenset[str] | None]]) -> frozenset[str]:
    """Return the options that may differ, given the options of each rank and those that it knows to differ.

    Raises:
        MismatchError: others differ.
    """
    options = [own for own, _ in told]
    known = [apart for _, apart in told if apart is not None]
    names = dict.fromkeys(name for own in options for name in own)
    differing = [name for name in names if len({own.get(name) for own in options}) > 1]
    apart = frozenset().union(*known) if known else frozenset(differing)
    for name in differing:
        if name not in apart:
            values = {rank: each.get(name, "nothing") for rank, each in enumerate(options)}
            raise MismatchError(
                f"distribute: at the start of a pass, the ranks' optimizers have different values of {name}: "
                f"{told_apart(values)}. At the start of an earlier pass they were equal. The models drift apart if "
                "ranks decide on numbers of their own: give schedulers such as ReduceLROnPlateau the same number on "
                "all ranks, from loader.global_loss or mt.mean"
            )
    return apart


def _options_of(optimizer: Any) -> Options:
    """Return the options of all parameter groups as text, by a name for messages."""
    return {
        f"{name!r} of parameter group {number}": text
        for number, group in enumerate(optimizer.param_groups)
        for name, value in sorted(group.items())
        if name != "params" and (text := _text_of(value)) is not None
    }


def _text_of(value: Any) -> str | None:
    """Return an option as text; None if it is no number, text or sequence of these."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return repr(value.item()) if math.prod(value.shape) == 1 else None
    if isinstance(value, list | tuple):
        texts = [_text_of(each) for each in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else None
