"""The elastic state of a framework that holds its values itself: in a net, in links or in variables."""

from typing import Any

from multiring.frontend.elastic.state import ObjectState, all_or_nothing
from multiring.frontend.lifecycle import rank
from multiring.frontend.object_collectives import allgather_object, broadcast_object


class ValuesState(ObjectState):
    """Values that the framework holds, and attributes.

    An adapter's class says how to read and write the values, and how all ranks get rank 0's.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Keep `kwargs` as attributes, and the values as they are now."""
        super().__init__(bcast_object=broadcast_object, get_rank=rank, gather_object=allgather_object, **kwargs)
        self._values = self._read()

    def _read(self) -> Any:
        """Return copies of the values."""
        raise NotImplementedError

    def _write(self, values: Any) -> None:
        """Set the values to `values`, which `_read` returned before."""
        raise NotImplementedError

    def _share(self) -> Any:
        """Set the values to rank 0's on every rank; return copies of them."""
        raise NotImplementedError

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
        """Make everything rank 0's on every rank, and keep it; what was kept stays if that fails."""
        with all_or_nothing(self):
            self._values = self._share()
            super().sync()
