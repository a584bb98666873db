"""TorchState: what a program with torch keeps of itself, to go on from after a failure."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multiring.frontend.elastic.state import ObjectState, all_or_nothing
from multiring.frontend.lifecycle import rank
from multiring.frontend.object_collectives import allgather_object, broadcast_object
from multiring.torch.elastic.sampler import ElasticSampler
from multiring.torch.gradients.optimizer import share_anew
from multiring.torch.gradients.parameters import broadcast_parameters
from multiring.torch.gradients.state import broadcast_optimizer_state
from multiring.torch.module_state import ModuleState, set_rest
from multiring.torch.parallelizing.held import held_by, held_of_module, refuse_parts

_PARTED = "mt.save and mt.load keep it, with `multiring run --max-restarts`"


class StateHandler:
    """How one object of a state is kept; the base of all handlers, also of others'."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def meet(self) -> None:
        """Ask the other ranks what `save` needs to know; all handlers have met before the first one saves."""

    def save(self) -> None:
        """Keep the object as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make the object what it was when it was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the object rank 0's on every rank, and keep it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Fit the object to the ranks there are now."""

    def set_value(self, value: Any) -> None:
        """Keep `value` instead from now on."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """An object that has a state_dict, a copy of which stays in memory."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Keep the object as it is now."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Make the object what it was when it was kept last."""
        # A copy: optimizers and schedulers go on working in what they load.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Make the object rank 0's on every rank, and keep it."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self._saved = copy.deepcopy(self.value.state_dict())


class ModelStateHandler(StateDictHandler):
    """A model's parameters and buffers, those that are not saved as well, and its extra state."""

    def __init__(self, model: nn.Module) -> None:
        refuse_parts("TorchState", held_of_module(model), _PARTED)
        super().__init__(model)
        self._unsaved = self._copied_unsaved()

    def save(self) -> None:
        """Keep the object as it is now."""
        super().save()
        self._unsaved = self._copied_unsaved()

    def restore(self) -> None:
        """Make the object what it was when it was kept last."""
        super().restore()
        set_rest(self.value, self._unsaved, {})

    def sync(self) -> None:
        """Make the object rank 0's on every rank, and keep it; in place."""
        broadcast_parameters(self.value, root_rank=0)
        self.save()

    def _copied_unsaved(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in ModuleState.of(self.value).unsaved.items()}


class OptimizerStateHandler(StateDictHandler):
    """An optimizer's state and options."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        refuse_parts("TorchState", held_by(optimizer), _PARTED)
        super().__init__(optimizer)

    def sync(self) -> None:
        """Make the object rank 0's on every rank, and keep it."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()

    def reset(self) -> None:
        """Share gradients with the ranks there are now, where the optimizer shares them."""
        share_anew(self.value)


class SamplerStateHandler(StateDictHandler):
    """Which samples are processed: what all ranks recorded together."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self._met: dict[str, Any] | None = None
        self._is_restored = False

    def meet(self) -> None:
        """Ask the others, before the first one saves, what all ranks recorded, where that is each rank's own."""
        if self.value.records_indices:
            self._met = _recorded_by_all(allgather_object(self.value.state_dict()))

    def save(self) -> None:
        """Keep the object as it is now."""
        if self._met is None:
            self.meet()
        self._saved = self._met or self.value.state_dict()
        self._met = None
        self._is_restored = False

    def restore(self) -> None:
        """Make the object what it was when it was kept last."""
        super().restore()
        self._is_restored = True

    def sync(self) -> None:
        """As in StateHandler, with what all ranks recorded.

        Rank 0 may be where it committed, and others where they committed before or after that, if the ranks failed
        amid a commit: then what rank 0 has kept of all ranks fits its model, and what they have does not.
        """
        told = allgather_object((self._is_restored, self.value.state_dict()))
        is_kept, state = told[0]
        self.value.load_state_dict(state if is_kept else _recorded_by_all([each for _, each in told]))
        self._saved = self.value.state_dict()
        self._is_restored = False

    def reset(self) -> None:
        """Deal the samples that are not processed to the ranks there are now."""
        self.value.reset()


def _recorded_by_all(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of `states`, by rank, with the samples that any of them has."""
    recorded = [state["processed_indices"] for state in states if "processed_indices" in state]
    if not recorded:
        return states[0]
    return states[0] | {"processed_indices": sorted({index for each in recorded for index in each})}


class TorchState(ObjectState):
    """A model, an optimizer and whatever else, each an attribute: kept by `commit`, the same on all ranks by `sync`.

    Modules, optimizers, learning rate schedulers, gradient scalers and ElasticSamplers are kept by their state_dict,
    and stay the objects they are; anything else is copied, and has to be what `broadcast_object` takes.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        kwargs: more of both, and anything else.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        named = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        handlers = {name: handler for name, value in named.items() if (handler := _handler_of(value)) is not None}
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers
        super().__init__(
            bcast_object=broadcast_object,
            get_rank=rank,
            gather_object=allgather_object,
            **{name: value for name, value in named.items() if name not in handlers},
        )

    def save(self) -> None:
        """Keep everything as it is now, or nothing where that fails."""
        for handler in self._handlers.values():
            handler.meet()
        with all_or_nothing(self, *self._handlers.values()):
            for handler in self._handlers.values():
                handler.save()
            super().save()

    def restore(self) -> None:
        """Make everything what it was when it was kept last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make everything rank 0's on every rank, and keep it; what was kept stays where that fails."""
        with all_or_nothing(self, *self._handlers.values()):
            for handler in self._handlers.values():
                handler.sync()
            super().sync()

    def reset(self) -> None:
        """Fit what depends on the ranks to those there are now."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in getattr(self, "_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


Registry = list[tuple[type[Any], Callable[[Any], StateHandler]]]

_registry: Registry = [
    (nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (torch.amp.GradScaler, StateDictHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return which handler is for which type: pairs of a type and what makes a StateHandler of an object of it."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Have TorchStates that are made from now on take their handlers from `registry`; the first type that fits wins."""
    global _registry  # noqa: PLW0603 -- Horovod's interface
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
