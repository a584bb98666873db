"""Eigenvalue-corrected Shampoo, whose matrices are divided among the ranks.

Each rank keeps the covariances and bases of some blocks of the matrices, and computes their updates. An allgather gives
all ranks all updates. So a step costs each rank only its share of the arithmetic and of the memory.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring._arguments import require_choice, require_flag, require_number, require_numbers, require_whole, shown
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring._runtime import Group
from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.torch.interop import described, dtype_name, dtype_of
from multiring.torch.optim import eigenbasis
from multiring.torch.optim.division import Divided, SharedResult, exchanged, owners_of
from multiring.torch.parallelizing.held import is_dtensor
from multiring.torch.step.gradients import evaluated, number, with_gradients

_DTYPES = (torch.float32, torch.float64)  # in which updates are computed
_WITHOUT = "multiring_without_blocks"  # marks a state_dict that lacks the state of all blocks
_LACKING = object()  # instead of the members that have the state: this rank lacks a part of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Eigendecomposition:
    """How Shampoo finds the bases of its matrices.

    Args:
        frequency: steps from one refresh of the bases to the next. Until the first, the step is AdamW's.
        method: "qr" refreshes by one step of orthogonal iteration, "eigh" by a whole decomposition.
        precision: type in which they are computed, torch.float32 or torch.float64; never less than a parameter's own.
        block: largest side of a block. Larger matrices are divided into blocks, each with bases of its own.
    """

    frequency: int = 10
    method: str = "qr"
    precision: torch.dtype = torch.float32
    block: int = 512

    def __post_init__(self) -> None:
        for name, value in (("frequency", self.frequency), ("block", self.block)):
            object.__setattr__(self, name, require_whole(name, value, 1))  # of Python's type, as they are saved
        require_choice("method", self.method, ("qr", "eigh"))
        if self.precision not in _DTYPES:
            raise ArgumentError(f"precision={self.precision!r}: want torch.float32 or torch.float64")


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A block of a parameter that is seen as a matrix."""

    parameter: Tensor
    number: int  # of the blocks of the parameter
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def key(self, name: str) -> str:
        """Return the name of one of the block's tensors in the optimizer's state."""
        return f"{self.number}.{name}"


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """A parameter of a step, with its group and its gradient."""

    group: dict[str, Any]
    parameter: Tensor
    gradient: Tensor


class Shampoo(Divided):
    """Shampoo with Adam in the eigenbases of its covariances (SOAP), whose work the ranks divide.

    Takes all parameters of a model: those with one dimension, or with one row or column, get AdamW's step. The
    gradients have to be the same on all ranks, as a DistributedOptimizer makes them.

    Each rank has the state of its own blocks only. `mt.save`, `mt.elastic` and `broadcast_optimizer_state` gather it;
    before `state_dict`, call `gather_state` on every rank. Any number of ranks can load it.
    """

    def __init__(  # noqa: PLR0913 -- torch's AdamW has as many
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        grafting: bool = True,
        eigendecomposition: Eigendecomposition | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Optimize `params`.

        In tensors of more than two dimensions, all dimensions but the first count as columns.

        Args:
            params: tensors, pairs of names and tensors, or groups with options of their own.
            lr: the learning rate. With grafting, rates of AdamW are a good start.
            betas: decay of the mean of the gradients, and of their squares and covariances.
            eps: added to the root of the second moment.
            weight_decay: decoupled weight decay.
            grafting: whether each block's update gets the norm of Adam's update.
            eigendecomposition: how the bases are found.
            process_set: the ranks that divide the work.

        Raises:
            ArgumentError: a number is out of range, or a parameter has complex numbers.
            UnsupportedError: a parameter is a DTensor.
        """
        lr, eps = require_number("lr", lr), require_number("eps", eps)
        weight_decay, grafting = require_number("weight_decay", weight_decay), require_flag("grafting", grafting)
        decays = require_numbers("betas", betas, 2, below=1.0)
        if eigendecomposition is not None and not isinstance(eigendecomposition, Eigendecomposition):
            raise ArgumentError(f"eigendecomposition={shown(eigendecomposition)}: want an Eigendecomposition, or None")
        how = eigendecomposition or Eigendecomposition()
        self._is_whole = True  # whether every rank has the state of all blocks
        self._divided_among: object = None  # otherwise, the members that have it
        self._leaves_out = False  # whether `state_dict` leaves the state of all blocks out
        defaults = {
            "lr": lr,
            "betas": decays,
            "eps": eps,
            "weight_decay": weight_decay,
            "grafting": grafting,
            "frequency": how.frequency,
            "method": how.method,
            "precision": dtype_name(how.precision),
            "block": how.block,
        }
        super().__init__(params, defaults, process_set)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps.

        Raises:
            StateError: other ranks have a part of the state.
        """
        self._require_whole("a copy")
        return {**super().__getstate__(), "_is_whole": True, "_divided_among": None, "_leaves_out": False}

    def _require(self, parameter: Tensor) -> None:
        """Raise an error if `parameter` is not of real numbers, or if this rank has only a part of it."""
        if is_dtensor(parameter):
            raise UnsupportedError(
                f"Shampoo of a parameter, {described(parameter)}, of which each rank has a part: Shampoo needs whole "
                "matrices; want a data or pipeline axis, or another optimizer"
            )
        if parameter.is_complex():
            raise ArgumentError(
                f"Shampoo of a parameter, {described(parameter)}: want real numbers; give complex ones to another "
                "optimizer, such as AdamW"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the current gradients.

        Every rank calls it, with the same gradients.

        Raises:
            StateError: the ranks have changed, and this rank does not have the state of its new blocks.
        """
        loss = evaluated(closure)
        found = [
            _Taken(group, parameter, gradient)
            for group in self.param_groups
            for parameter, gradient in zip(*with_gradients("Shampoo", group), strict=True)
        ]
        if not found:  # for example the first step with gradient lag
            return loss
        ranks = self._ranks()
        owners = self._owner_ranks(ranks)
        self._release(ranks, owners)
        for each in found:
            state = self.state[each.parameter]
            state["step"] = state.get("step", 0) + 1
        updates = self._updates(found, ranks, owners)
        for each in found:
            rate, parameter = number(each.group["lr"]), each.parameter
            parameter.mul_(1 - rate * each.group["weight_decay"])
            parameter.add_(updates[parameter].view(parameter.shape), alpha=-rate)
        return loss

    def gather_state(self) -> None:
        """Give every rank the state of all blocks, so that `state_dict` is complete; every rank calls it.

        The next step drops what belongs to other ranks.

        Raises:
            StateError: the ranks have changed since the last step. Every rank raises it.
        """
        if self._leaves_out:
            return
        ranks = self._ranks()
        if ranks is None:
            self._require_same_ranks(None)
            return
        # After a load on one rank only, it has the whole state, and has to take part nevertheless.
        is_same = self._is_whole or self._divided_among is self._twin_of
        told = ranks.all_gather(np.array([[self._is_whole, is_same]]))
        if not told[:, 1].all():
            raise _changed_ranks()
        if told[:, 0].all():
            return
        owners = self._owner_ranks(ranks)
        for dtype in _DTYPES:
            places = [
                (block, name)
                for group in self.param_groups
                for parameter in group["params"]
                if self.state.get(parameter) and _type_of(parameter) is dtype
                for block in _blocks_of(parameter, group["block"])
                for name in eigenbasis.names_of(_rule(group), self.state[parameter]["step"])
            ]
            if not places:
                continue
            shapes = [eigenbasis.shape_of(name, *block.shape) for block, name in places]
            results = [
                SharedResult(owners[block.parameter][block.number], math.prod(shape), block.parameter.device)
                for (block, _), shape in zip(places, shapes, strict=True)
            ]
            own = {
                i: self.state[block.parameter][block.key(name)]
                for i, (block, name) in enumerate(places)
                if results[i].owner == ranks.rank
            }
            tensors = exchanged(ranks, own, results, dtype, what="Shampoo")
            for (block, name), shape, flat in zip(places, shapes, tensors, strict=True):
                # A copy, because the tensors of one exchange share their memory.
                self.state[block.parameter].setdefault(block.key(name), flat.view(shape).clone())
        self._is_whole = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch.

        Raises:
            StateError: other ranks have a part of the state. `gather_state` on every rank gathers it.
        """
        if self._leaves_out:
            state = super().state_dict()
            alike = {at: {key: each[key] for key in each if "." not in key} for at, each in state["state"].items()}
            return {**state, "state": alike, _WITHOUT: True}
        self._require_whole("state_dict()")
        return super().state_dict()

    @contextlib.contextmanager
    def without_blocks(self) -> Iterator[None]:
        """Leave the state of all blocks out of `state_dict` in the block: what is left is the same on all ranks."""
        self._leaves_out = True
        try:
            yield
        finally:
            self._leaves_out = False

    def own_blocks(self) -> dict[tuple[int, str], Tensor] | None:
        """Return the state of this rank's blocks, by the parameter's number and key; None if not all ranks divide it.

        The tensors are the optimizer's own.
        """
        if self._process_set is not global_process_set:
            return None
        ranks = self._ranks()
        rank = 0 if ranks is None else ranks.rank
        found: dict[tuple[int, str], Tensor] = {}
        for at, (parameter, owned) in enumerate(self._owner_ranks(ranks, of_all=True).items()):
            for key, value in self.state.get(parameter, {}).items():
                if "." in key and owned[int(key.split(".")[0])] == rank:
                    found[at, key] = value
        return found

    def load_blocks(self, blocks: Mapping[tuple[int, str], Tensor], *, are_all: bool) -> None:
        """Take the state of blocks, instead of what there is.

        Args:
            blocks: as `own_blocks` returns it, of some or all ranks.
            are_all: whether they are all blocks.
        """
        parameters = [each for group in self.param_groups for each in group["params"]]
        for parameter in parameters:
            state = self.state.get(parameter, {})
            for key in [key for key in state if "." in key]:
                del state[key]
        for (at, key), value in blocks.items():
            self.state[parameters[at]][key] = value.to(parameters[at].device, copy=True)
        self._is_whole, self._divided_among = are_all, None if are_all else _LACKING

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as in torch, but without rounding it to the type of the parameters."""
        super().load_state_dict(state_dict)
        numbers = [at for group in state_dict["param_groups"] for at in group["params"]]
        parameters = [each for group in self.param_groups for each in group["params"]]
        for at, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(at, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
        is_lacking = bool(state_dict.get(_WITHOUT))
        self._is_whole, self._divided_among = not is_lacking, _LACKING if is_lacking else None

    def _require_whole(self, what: str) -> None:
        if not self._is_whole:
            raise StateError(
                f"{what} of Shampoo: each rank has the state of its own matrices; call optimizer.gather_state() on "
                "every rank before, or save with mt.save"
            )

    def _require_same_ranks(self, group: object) -> None:
        """Raise StateError if the state is divided among other ranks than those of `group`."""
        if not self._is_whole and self._divided_among is not group:
            raise _changed_ranks()

    def _owner_ranks(self, ranks: Group | None, *, of_all: bool = False) -> dict[Tensor, list[int]]:
        """Return the owner of each block of each parameter; with `of_all`, also of parameters without blocks.

        It does not depend on which parameters have a gradient, and stays when a group of parameters is added.
        """
        load = [0.0] * (1 if ranks is None else ranks.size)
        found: dict[Tensor, list[int]] = {}
        for group in self.param_groups:
            if of_all:
                found.update((parameter, []) for parameter in group["params"])
            blocks = [block for parameter in group["params"] for block in _blocks_of(parameter, group["block"])]
            owners = owners_of([eigenbasis.cost_of(*each.shape, group["frequency"]) for each in blocks], load)
            for block, owner in zip(blocks, owners, strict=True):
                found.setdefault(block.parameter, []).append(owner)
        return found

    def _release(self, ranks: Group | None, owners: dict[Tensor, list[int]]) -> None:
        """Drop the state of other ranks' blocks.

        Raises:
            StateError: this rank lacks the state of its own.
        """
        group = None if ranks is None else self._twin_of
        self._require_same_ranks(group)
        if not self._is_whole or ranks is None:
            return
        self._divided_among, self._is_whole = group, False
        for parameter, owned in owners.items():
            strange = {f"{number}" for number, owner in enumerate(owned) if owner != ranks.rank}
            state = self.state.get(parameter, {})
            for key in [key for key in state if "." in key and key.split(".")[0] in strange]:
                del state[key]

    def _updates(
        self, found: list[_Taken], ranks: Group | None, owners: dict[Tensor, list[int]]
    ) -> dict[Tensor, Tensor]:
        """Return the update of each parameter for a learning rate of 1."""
        updates = {each.parameter: self._elementwise(each) for each in found if not _is_matrix(each.parameter)}
        blocks = [(each, block) for each in found for block in _blocks_of(each.parameter, each.group["block"])]
        for dtype in _DTYPES:
            mine = [each for each in blocks if _type_of(each[1].parameter) is dtype]
            if not mine:
                continue
            results = [
                SharedResult(owners[block.parameter][block.number], math.prod(block.shape), block.parameter.device)
                for _, block in mine
            ]
            own = {
                i: self._of_block(taken, block)
                for i, (taken, block) in enumerate(mine)
                if ranks is None or results[i].owner == ranks.rank
            }
            done = list(own.values()) if ranks is None else exchanged(ranks, own, results, dtype, what="Shampoo")
            for (_, block), result in zip(mine, done, strict=True):
                whole = updates.get(block.parameter)
                if whole is None and result.numel() == block.parameter.numel():
                    updates[block.parameter] = result.view(block.shape)
                    continue
                if whole is None:
                    whole = updates[block.parameter] = result.new_empty(_matrix_shape(block.parameter))
                whole[block.rows, block.columns] = result.view(block.shape)
        return updates

    def _of_block(self, taken: _Taken, block: _Block) -> Tensor:
        parameter, rule = block.parameter, _rule(taken.group)
        state = self.state[parameter]
        gradient = taken.gradient.reshape(_matrix_shape(parameter))[block.rows, block.columns].to(_type_of(parameter))
        names = eigenbasis.names_of(rule, state["step"] - 1) if state["step"] > 1 else ()
        own = {name: state[block.key(name)] for name in names}
        update, has_failed = eigenbasis.step(own, gradient, state["step"], rule)
        state.update((block.key(name), tensor) for name, tensor in own.items())
        if has_failed:
            warnings.warn(
                f"Shampoo: no eigenvectors were found for a block of a parameter, {described(parameter)}, at step "
                f"{state['step']}: its last bases are kept; are its gradients finite?",
                RuntimeWarning,
                stacklevel=2,
            )
        return update

    def _elementwise(self, taken: _Taken) -> Tensor:
        """Return Adam's update of a parameter that is no matrix; every rank does this work."""
        rule, state = _rule(taken.group), self.state[taken.parameter]
        gradient = taken.gradient.to(_type_of(taken.parameter))
        if "moment" not in state:
            state["moment"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["moment"].lerp_(gradient, 1 - rule.betas[0])
        return eigenbasis.adam(state["moment"], gradient, state["second"], state["step"], rule)


def _changed_ranks() -> StateError:
    return StateError(
        "Shampoo: the ranks have changed since its last step, and each has the state of its former matrices only; want "
        "a load_state_dict or mt.load in between, as mt.elastic does"
    )


def _rule(group: dict[str, Any]) -> eigenbasis.Rule:
    return eigenbasis.Rule(
        betas=group["betas"],
        eps=group["eps"],
        grafting=group["grafting"],
        frequency=group["frequency"],
        method=group["method"],
        precision=dtype_of(group["precision"]),
    )


def _type_of(parameter: Tensor) -> torch.dtype:
    """Return the type in which a parameter's update is computed."""
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    rows = parameter.size(0)
    return rows, parameter.numel() // max(1, rows)


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and min(_matrix_shape(parameter)) > 1


def _blocks_of(parameter: Tensor, largest: int) -> list[_Block]:
    """Return the blocks of a parameter, in order; none if it is no matrix."""
    if not _is_matrix(parameter):
        return []
    rows, columns = (_slices(size, largest) for size in _matrix_shape(parameter))
    every = [(one, other) for one in rows for other in columns]
    return [_Block(parameter, number, *each) for number, each in enumerate(every)]


def _slices(size: int, largest: int) -> list[slice]:
    """Cut `size` into as few parts as possible of at most `largest`, which differ by at most one."""
    parts = -(-size // largest)
    ends = [size * at // parts for at in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]
