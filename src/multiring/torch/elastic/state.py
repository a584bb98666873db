"""TorchState: the state from which a torch program continues after a failure."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multiring._frontend.elastic.own import OwnPart
from multiring._frontend.elastic.state import ObjectState, all_or_nothing
from multiring._frontend.lifecycle import rank
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring.torch.distributing.loader import DistributedLoader
from multiring.torch.elastic.own import parts_of_optimizer, without_blocks, without_residuals
from multiring.torch.elastic.sampler import ElasticSampler
from multiring.torch.feeding import DataLoader
from multiring.torch.gathered_state import gather_state
from multiring.torch.gradients.optimizer import share_anew
from multiring.torch.gradients.parameters import broadcast_parameters
from multiring.torch.gradients.state import broadcast_optimizer_state
from multiring.torch.module_state import ModuleState, set_rest
from multiring.torch.parallelizing.held import held_by, held_of_module, refuse_parts
from multiring.torch.path_agreement import settle_reductions

_PARTED = "mt.save and mt.load keep it, with `multiring run --max-restarts`"


class StateHandler:
    """The base of all handlers; a handler saves, restores and synchronises one object of a state."""

    sync_root = 0
    """The rank whose object all ranks take in `sync`; see `State.sync_root`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    leaves_own_parts = False
    """Whether `save` and `sync` can leave own parts out, because they are committed and set apart."""

    def own_parts(self) -> Mapping[str, OwnPart]:
        """Return the parts of the object of which each rank has its own, by name; the same names on all ranks."""
        return {}

    def meet(self) -> None:
        """Exchange information with other ranks, before any handler saves."""

    def save(self) -> None:
        """Save the object as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the object as it was last saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Replace the object on every rank by that of rank `sync_root`, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the object to the current ranks."""

    def set_value(self, value: Any) -> None:
        """Replace the object by `value`, and save it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Saves the state_dict of an object as a copy in memory."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Save the object as it is now."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Restore the object as it was last saved."""
        # A copy is loaded, because optimizers and schedulers change the state that they load in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Replace the object on every rank by that of rank `sync_root`, and save it."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=self.sync_root))
        self._saved = copy.deepcopy(self.value.state_dict())


class ModelStateHandler(StateDictHandler):
    """Saves a model's parameters, buffers and extra state.

    Non-persistent buffers are saved, too.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_parts("TorchState", held_of_module(model), _PARTED)
        super().__init__(model)
        self._unsaved = self._copied_unsaved()

    def save(self) -> None:
        """Save the model as it is now."""
        super().save()
        self._unsaved = self._copied_unsaved()

    def restore(self) -> None:
        """Restore the model as it was last saved."""
        super().restore()
        set_rest(self.value, self._unsaved, {})

    def sync(self) -> None:
        """Replace the model's state on every rank by that of rank `sync_root` in place, and save it."""
        broadcast_parameters(self.value, root_rank=self.sync_root)
        self.save()

    def _copied_unsaved(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in ModuleState.of(self.value).unsaved.items()}


class OptimizerStateHandler(StateDictHandler):
    """Saves an optimizer's state and options.

    The state that differs between ranks are own parts: the blocks of a Shampoo, and residuals of compression.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        refuse_parts("TorchState", held_by(optimizer), _PARTED)
        gather_state(optimizer)
        super().__init__(optimizer)

    def own_parts(self) -> dict[str, OwnPart]:
        """Return the parts of which each rank has its own."""
        return parts_of_optimizer(self.value)

    def save(self) -> None:
        """Save the optimizer as it is now."""
        with without_blocks(self.value, is_wanted=self.leaves_own_parts):
            gather_state(self.value)
            self._saved = copy.deepcopy(without_residuals(self.value.state_dict()))

    def sync(self) -> None:
        """Replace the optimizer's state on every rank by that of rank `sync_root`, and save it.

        Own parts follow, if the ranks have any of a commit.
        """
        with without_blocks(self.value, is_wanted=self.leaves_own_parts):
            broadcast_optimizer_state(self.value, root_rank=self.sync_root)
        self.save()

    def reset(self) -> None:
        """Make a DistributedOptimizer reduce its gradients over the current ranks."""
        share_anew(self.value)


class SamplerStateHandler(StateDictHandler):
    """Saves the samples that all ranks together have recorded as processed."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self._met: dict[str, Any] | None = None
        self._is_restored = False

    def meet(self) -> None:
        """Gather the samples that all ranks recorded, if each rank records its own."""
        if self.value.records_indices:
            self._met = _recorded_by_all(allgather_object(self.value.state_dict()))

    def save(self) -> None:
        """Save the recorded samples of all ranks."""
        if self._met is None:
            self.meet()
        self._saved = self._met or self.value.state_dict()
        self._met = None
        self._is_restored = False

    def restore(self) -> None:
        """Restore the recorded samples as they were last saved."""
        super().restore()
        self._is_restored = True

    def sync(self) -> None:
        """Make the recorded samples the same on every rank, and save them.

        If rank `sync_root` has just restored its last commit, all ranks take its samples. A failure during a commit may
        leave other ranks with an earlier or later commit, whose samples do not match its model. Otherwise all ranks
        take the samples that any rank has recorded.
        """
        told = allgather_object((self._is_restored, self.value.state_dict()))
        is_kept, state = told[self.sync_root]
        self.value.load_state_dict(state if is_kept else _recorded_by_all([each for _, each in told]))
        self._saved = self.value.state_dict()
        self._is_restored = False

    def reset(self) -> None:
        """Deal the unprocessed samples to the current ranks."""
        self.value.reset()


class LoaderStateHandler(StateHandler):
    """Saves the place of a loader in its data: what was handed out of the current epoch."""

    def __init__(self, loader: DistributedLoader[Any] | DataLoader) -> None:
        super().__init__(loader)
        if isinstance(loader, DistributedLoader):
            loader.keep_place()
        self._saved = loader.state_dict()

    def save(self) -> None:
        """Save the place after the newest batch."""
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        """Go on from the place that was saved last, in the next iteration."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Make every rank go on from the place of rank `sync_root`, and save it."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=self.sync_root))
        self.save()


def _recorded_by_all(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of `states`, extended by the samples that any rank has recorded."""
    recorded = [state["processed_indices"] for state in states if "processed_indices" in state]
    if not recorded:
        return states[0]
    return states[0] | {"processed_indices": sorted({index for each in recorded for index in each})}


class TorchState(ObjectState):
    """A model, an optimizer and other values, for `commit` and `sync`.

    Each value is an attribute of the state. `commit` saves all values, and `sync` replaces them by rank 0's.

    Modules, optimizers, learning rate schedulers, gradient scalers, ElasticSamplers, loaders of `distribute`, and
    `multiring.torch.DataLoader`s are saved by their state_dict, and stay the same objects. Any other value is copied,
    so it has to be one that `broadcast_object` accepts.

    What differs between ranks is committed on each rank, and in a peer's memory: the state of a Shampoo, residuals of
    compression, and values that are given as an `OwnValue` or a `Randomness`.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        kwargs: further modules, optimizers and other values, by attribute name.
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
        """Save all values as they are now, or none of them if one cannot be saved.

        The call waits until all reductions of gradients on devices have ended, so that no failed one is saved.
        """
        settle_reductions()
        for handler in self._handlers.values():
            handler.meet()
        with all_or_nothing(self, *self._handlers.values()):
            for handler in self._handlers.values():
                handler.leaves_own_parts = self._own.are_apart
                handler.save()
            super().save()

    def restore(self) -> None:
        """Restore all values as they were last saved."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Replace all values on every rank by those of rank `sync_root`, and save them.

        If this fails, the values of the last save remain.

        Raises:
            MismatchError: on every rank: the ranks' states have different attributes.
        """
        with self._comparing(), all_or_nothing(self, *self._handlers.values()):
            for handler in self._handlers.values():
                handler.sync_root, handler.leaves_own_parts = self.sync_root, self._own.are_apart
                handler.sync()
            super().sync()

    def _structure(self) -> list[str]:
        handled = [f"attribute {name!r} of {type(each).__name__}" for name, each in self._handlers.items()]
        return [*handled, *super()._structure()]

    def _own_parts(self) -> Mapping[str, OwnPart]:
        found = dict(super()._own_parts())
        for name, handler in self._handlers.items():
            found.update({f"{name}.{part}": each for part, each in handler.own_parts().items()})
        return found

    def _saved(self) -> Any:
        handlers = {
            name: {key: value for key, value in vars(each).items() if key != "value"}
            for name, each in self._handlers.items()
        }
        return super()._saved(), handlers

    def _set_saved(self, saved: Any) -> None:
        attributes, handlers = saved
        super()._set_saved(attributes)
        for name, kept in handlers.items():
            vars(self._handlers[name]).update(kept)

    def reset(self) -> None:
        """Adapt samplers and optimizers to the current ranks."""
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
    (DistributedLoader, LoaderStateHandler),
    (DataLoader, LoaderStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the registry: pairs of a type and the handler class of its objects."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use `registry` for all TorchStates that are created from now on.

    Args:
        registry: pairs of a type and a function that makes a StateHandler of an object of this type. The first type
            that matches is used.
    """
    global _registry  # noqa: PLW0603 -- Horovod's interface
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
