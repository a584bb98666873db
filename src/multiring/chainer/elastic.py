"""Training that goes on after a failure, from where it last committed.

state = multiring.chainer.elastic.ChainerState(model, optimizer, epoch=0)
"""

import copy
from typing import Any

import chainer

from multiring.frontend.elastic.running import run
from multiring.frontend.elastic.state import ObjectState, State
from multiring.frontend.elastic.values_state import ValuesState
from multiring.frontend.object_collectives import broadcast_object

__all__ = ["ChainerState", "ObjectState", "State", "run"]


class ChainerState(ValuesState):
    """A model of Chainer, its optimizer, and whatever else, each an attribute.

    Args:
        model: a link.
        optimizer: that was set up with it; also one of `create_multi_node_optimizer`.
        kwargs: what `broadcast_object` takes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        super().__init__(**kwargs)

    def _kept(self) -> dict[str, Any]:
        return {"model": self.model} | ({} if self.optimizer is None else {"optimizer": self.optimizer})

    def _read(self) -> dict[str, Any]:
        found = {}
        for name, each in self._kept().items():
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(each)
            found[name] = copy.deepcopy(serializer.target)
        return found

    def _write(self, values: dict[str, Any]) -> None:
        for name, each in self._kept().items():
            # What there is nothing of, as an optimizer's state before its first step, stays as it is.
            chainer.serializers.NpzDeserializer(copy.deepcopy(values[name]), strict=False).load(each)

    def _share(self) -> dict[str, Any]:
        values: dict[str, Any] = broadcast_object(self._read())
        self._write(values)
        return values
