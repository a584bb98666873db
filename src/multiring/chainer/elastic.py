"""Training that goes on after a failure, from where it last committed.

state = multiring.chainer.elastic.ChainerState(model, optimizer, epoch=0)
"""

import copy
from typing import Any

import chainer

from multiring.frontend.elastic.running import run
from multiring.frontend.elastic.state import ObjectState, State, all_or_nothing
from multiring.frontend.lifecycle import rank
from multiring.frontend.object_collectives import allgather_object, broadcast_object

__all__ = ["ChainerState", "ObjectState", "State", "run"]


class ChainerState(ObjectState):
    """A model of Chainer, its optimizer, and whatever else, each an attribute.

    Args:
        model: a link.
        optimizer: that was set up with it; also one of `create_multi_node_optimizer`.
        kwargs: what `broadcast_object` takes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        super().__init__(bcast_object=broadcast_object, get_rank=rank, gather_object=allgather_object, **kwargs)
        self._values = self._read()

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

    def save(self) -> None:
        """Keep everything as it is now."""
        with all_or_nothing(self):
            self._values = self._read()
            super().save()

    def restore(self) -> None:
        """Make everything what it was when it was kept last."""
        self._write(self._values)
        super().restore()

    def sync(self) -> None:
        """Make everything rank 0's on every rank, and keep it."""
        with all_or_nothing(self):
            self._values = broadcast_object(self._read())
            self._write(self._values)
            super().sync()
