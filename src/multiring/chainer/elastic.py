"""Training that continues from the last commit after a failure.

state = multiring.chainer.elastic.ChainerState(model, optimizer, epoch=0)
"""

import copy
from typing import Any

import chainer

from multiring._frontend.elastic.own import OwnValue, Randomness, RankChange
from multiring._frontend.elastic.running import run
from multiring._frontend.elastic.speed_shares import SpeedShares
from multiring._frontend.elastic.state import ObjectState, State
from multiring._frontend.elastic.values_state import ValuesState
from multiring._frontend.object_collectives import broadcast_object
from multiring.chainer.gradients import form_of

__all__ = ["ChainerState", "ObjectState", "OwnValue", "Randomness", "RankChange", "SpeedShares", "State", "run"]


class ChainerState(ValuesState):
    """A state with a Chainer model, its optimizer and other values.

    The model, the optimizer and each value are attributes of the state.

    Args:
        model: a link.
        optimizer: an optimizer that was set up with the model, also from `create_multi_node_optimizer`.
        kwargs: other values by name, of any type that `broadcast_object` accepts.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        super().__init__(**kwargs)

    def _kept(self) -> dict[str, Any]:
        return {"model": self.model} | ({} if self.optimizer is None else {"optimizer": self.optimizer})

    def _structure(self) -> list[str]:
        form = [f"model{name}, {kind} of {shape}" for name, shape, kind in form_of(self.model)]
        # An optimizer has values of its own after its first step, which a new rank has not taken.
        return [*form, f"optimizer {type(self.optimizer).__name__}", *super()._structure()]

    def _read(self) -> dict[str, Any]:
        found = {}
        for name, each in self._kept().items():
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(each)
            found[name] = copy.deepcopy(serializer.target)
        return found

    def _write(self, values: dict[str, Any]) -> None:
        for name, each in self._kept().items():
            # A value that is not in the saved state does not change. An optimizer, for example, has such values after
            # its first step.
            chainer.serializers.NpzDeserializer(copy.deepcopy(values[name]), strict=False).load(each)

    def _share(self) -> dict[str, Any]:
        values: dict[str, Any] = broadcast_object(self._read(), root_rank=self.sync_root)
        self._write(values)
        return values
