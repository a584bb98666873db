"""The elastic state for frameworks that store a model's values themselves, such as Caffe, Chainer and TensorFlow."""

from typing import Any

from multiring._frontend.elastic.state import ObjectState, all_or_nothing
from multiring._frontend.lifecycle import rank
from multiring._frontend.object_collectives import allgather_object, broadcast_object


class ValuesState(ObjectState):
    """A state of attributes, and of values that the framework stores.

    An adapter's subclass reads and writes the values, and sets all ranks' values to those of rank `sync_root`.
    """

    _SAVED = ("_saved_state", "_values")

    def __init__(self, **kwargs: Any) -> None:
        """Set `kwargs` as attributes, and save them and the current values."""
        super().__init__(bcast_object=broadcast_object, get_rank=rank, gather_object=allgather_object, **kwargs)
        self._values = self._read()

    def _read(self) -> Any:
        """Return copies of the values."""
        raise NotImplementedError

    def _write(self, values: Any) -> None:
        """Set the framework's values to an earlier result of `_read`."""
        raise NotImplementedError

    def _share(self) -> Any:
        """Set every rank's values to those of rank `sync_root`, and return copies of them."""
        raise NotImplementedError

    def save(self) -> None:
        """Save the attributes and the values in memory."""
        with all_or_nothing(self):
            self._values = self._read()
            super().save()

    def restore(self) -> None:
        """Restore the attributes and the values that were saved last."""
        self._write(self._values)
        super().restore()

    def sync(self) -> None:
        """Set attributes and values of every rank to those of rank `sync_root`, and save them.

        If this fails, the last save remains.

        Raises:
            MismatchError: on every rank: the ranks' states have different attributes or values.
        """
        with self._comparing(), all_or_nothing(self):
            self._values = self._share()
            super().sync()
