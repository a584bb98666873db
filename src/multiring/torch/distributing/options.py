"""The options of an optimizer, such as its learning rate, which must stay equal on all ranks."""

from typing import Any

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
    only options that were equal before must stay equal.

    Args:
        optimizer: the optimizer of this rank.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._were_equal = False

    def require_equal(self) -> None:
        """Compare the options; every rank must call it.

        Raises:
            MismatchError: they differ, and were equal at an earlier call. Every rank raises it.
        """
        if size() == 1:
            return
        own = _options_of(self._optimizer)
        told = torch.tensor([[fingerprint(repr(own)), int(self._were_equal)]], device="cpu")
        rows = allgather(told, name="distribute.options").tolist()
        is_equal = len({seen for seen, _ in rows}) == 1
        # A rank that joined a running job has compared nothing yet.
        if not is_equal and any(were_equal for _, were_equal in rows):
            _raise_difference(allgather_object(own, name="distribute.options_apart"))
        self._were_equal = is_equal


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
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        texts = [_text_of(each) for each in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else None


def _raise_difference(options: list[Options]) -> None:
    for name in dict.fromkeys(name for each in options for name in each):
        values = {rank: each.get(name, "nothing") for rank, each in enumerate(options)}
        if len(set(values.values())) > 1:
            raise MismatchError(
                f"distribute: at the start of a pass, the ranks' optimizers have different values of {name}: "
                f"{told_apart(values)}. At the start of an earlier pass they were equal. The models drift apart if "
                "ranks decide on numbers of their own: give schedulers such as ReduceLROnPlateau the same number on "
                "all ranks, from loader.global_loss or mt.mean"
            )
