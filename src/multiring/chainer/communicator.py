"""Communicator: ChainerMN's communicator interface on top of multiring's ranks."""

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from chainermn.communicators import CommunicatorBase

from multiring._frontend import array_collectives
from multiring._frontend.consistency_check import require_alike
from multiring._frontend.errors import internal_errors
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._frontend.process_sets import Members, ProcessSet, members_of
from multiring._gradients.options import WireOnly
from multiring.chainer.gradients import ModelGradients, form_of, give, parameters_of
from multiring.chainer.messages import Messages
from multiring.errors import ArgumentError, MismatchError, StateError

Array = Any  # NumPy's


class Communicator(CommunicatorBase):  # type: ignore[misc] # Chainer has no types
    """A set of ranks that run collectives together, in the same order.

    Ranks are numbered within the set.

    Arrays are NumPy arrays of any type that multiring can reduce. A failed operation raises CollectiveError on
    every rank. The error is also a MismatchError if the ranks disagree, or a PeerLostError if a rank is lost.
    """

    def __init__(self, process_set: ProcessSet | Members, gradient_dtype: Any = None) -> None:
        """Make a communicator from a process set or a group's members.

        `create_communicator` explains the arguments.

        Raises:
            ArgumentError: `gradient_dtype` is not float16, float32 or None, or this rank is not in the set.
        """
        super().__init__()
        self.set_config("batched_copy")
        self._process_set = process_set
        self._by_members: weakref.WeakKeyDictionary[Members, _OfMembership] = weakref.WeakKeyDictionary()
        self._splits = 0
        if gradient_dtype is not None and np.dtype(gradient_dtype) not in {np.dtype("f2"), np.dtype("f4")}:
            raise ArgumentError(f"allreduce_grad_dtype={gradient_dtype!r}: want numpy.float16, numpy.float32 or None")
        self._gradient_dtype = gradient_dtype
        self._is_finalized = False
        members_of(process_set)

    # ---- the ranks ----

    @property
    def members(self) -> Members:
        """The current ranks.

        After a failure, these are the ranks that joined the job again.
        """
        if self._is_finalized:
            raise StateError("this communicator was finalized; make a new one with create_communicator")
        return members_of(self._process_set)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.members.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.members.size

    @property
    def intra_rank(self) -> int:
        """This process's index among the ranks of its host."""
        return self._hosts()[self.inter_rank].index(self.rank)

    @property
    def intra_size(self) -> int:
        """The number of ranks on this process's host."""
        return len(self._hosts()[self.inter_rank])

    @property
    def inter_rank(self) -> int:
        """The index of this process's host."""
        return next(number for number, ranks in enumerate(self._hosts()) if self.rank in ranks)

    @property
    def inter_size(self) -> int:
        """The number of hosts."""
        return len(self._hosts())

    def _hosts(self) -> Sequence[tuple[int, ...]]:
        return self.members.group.topology.hosts

    def split(self, color: int, key: int) -> "Communicator":
        """Return a communicator of all ranks that pass the same `color`.

        Its ranks are ordered by `key`, then by their rank here.
        """
        members = self.members
        told = allgather_object((color, key), "split", members)
        chosen = sorted((each[1], rank) for rank, each in enumerate(told) if each[0] == color)
        self._splits += 1
        group = members.group.subgroup_named([rank for _, rank in chosen], f"split {self._splits} of a communicator")
        return Communicator(Members(group), self._gradient_dtype)

    def finalize(self) -> None:
        """Make the communicator unusable. The job continues."""
        self._is_finalized = True

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:  # noqa: FBT002 -- ChainerMN's
        """Set ChainerMN's option `batched_copy`, which has no effect here.

        Another option raises ArgumentError.
        """
        if name != "batched_copy":
            raise ArgumentError(f"Unknown config: {name}; want batched_copy{' only' if kwargs else ''}")
        with self.config_scope():
            self.batched_copy = value

    def get_config(self, name: str | None = None) -> Any:
        """Return the option `name`, or all options; see ChainerMN."""
        if name == "batched_copy":
            return self.batched_copy
        return super().get_config(name)

    # ---- arrays ----

    def allreduce(self, data: Array, op: str = "sum", name: str | None = None) -> Array:
        """Return the combination of all ranks' arrays.

        `op` is "sum", "average", "min", "max" or "product".
        """
        return array_collectives.allreduce(_array("allreduce", data), op, name=name, process_set=self.members)

    def bcast(self, data: Array, max_buf_len: int | None = None, root: int = 0) -> Array:
        """Return the array of rank `root`. Other ranks' `data` is ignored."""
        del max_buf_len
        members = self.members
        form = None
        if members.rank == root:
            data = _array("bcast", data)
            form = data.shape, data.dtype.name
        shape, dtype = self.bcast_obj(form, root=root)
        if members.rank == root:
            array_collectives.broadcast(data, members.group.ranks[root], process_set=members)
            return data
        return array_collectives.broadcast(np.empty(shape, dtype), members.group.ranks[root], process_set=members)

    def allgather(self, x: Array) -> tuple[Array, ...]:
        """Return all ranks' arrays, ordered by rank.

        The arrays may differ in shape, but not in type.
        """
        shapes = self._shapes("allgather", _array("allgather", x))
        found = array_collectives.allgather(np.ravel(x), process_set=self.members)
        return _parted(found, shapes)

    def gather(self, data: Array, root: int = 0) -> tuple[Array, ...] | None:
        """Return all ranks' arrays by rank on rank `root`, and None on other ranks."""
        members = self.members
        own = _array("gather", data)
        self._shapes("gather", own)
        if members.rank != root:
            self._messages.send(own, root, 0)
            return None
        return tuple(own.copy() if rank == root else self._messages.receive(rank, 0) for rank in range(members.size))

    def scatter(self, xs: Any, root: int = 0) -> Array:
        """Return this rank's part of `xs` on rank `root`.

        Args:
            xs: on rank `root`: a tuple with one array per rank, or an array with one row per rank.
            root: the rank that sends.

        Raises:
            ArgumentError: on every rank: the number of parts is not the number of ranks.
        """
        members = self.members
        fault = None
        if members.rank == root and len(xs) != members.size:
            fault = f"scatter of {len(xs)} arrays from rank {root}: want {members.size}, one for each rank"
        fault = self.bcast_obj((fault,) if members.rank == root else None, root=root)[0]
        if fault:
            raise ArgumentError(fault)
        if members.rank != root:
            return self._messages.receive(root, 0)
        for rank in range(members.size):
            if rank != root:
                self._messages.send(_array("scatter", xs[rank]), rank, 0)
        return np.array(xs[root])

    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        """Send `xs[rank]` to each rank, and return the received arrays by rank.

        All arrays of all ranks must have the same type.
        """
        members = self.members
        if len(xs) != members.size:
            raise ArgumentError(f"alltoall of {len(xs)} arrays: want {members.size}, one for each rank")
        arrays = [_array("alltoall", each) for each in xs]
        told = allgather_object([(each.shape, each.dtype.name) for each in arrays], "alltoall", members)
        dtypes = {dtype for forms in told for _, dtype in forms}
        if len(dtypes) > 1:
            raise MismatchError(f"alltoall: the ranks' arrays are of different types, {sorted(dtypes)}")
        with internal_errors("alltoall"):
            flat = np.concatenate([each.reshape(-1) for each in arrays])
            found = members.group.all_to_all(flat, splits=[each.size for each in arrays])
        return _parted(np.asarray(found), [forms[members.rank][0] for forms in told])

    def send(self, data: Any, dest: int, tag: int) -> None:
        """Send an array, or a tuple or list of arrays, to rank `dest`.

        Rank `dest` calls `recv` with the same tag.
        """
        self._messages.send(data, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        """Return the next array or tuple of arrays from rank `source` with `tag`."""
        return self._messages.receive(source, tag)

    # ---- objects ----

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object that can be pickled to rank `dest`."""
        self._messages.send_object(obj, dest, tag)

    def recv_obj(self, source: int, tag: int | None = None, status: Any = None) -> Any:
        """Return the next object from rank `source` with `tag`, default: any tag."""
        if status is not None:
            raise ArgumentError(f"recv_obj(status={status!r}): multiring does not use MPI; want None")
        return self._messages.receive(source, tag)

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Return the object of rank `root`."""
        del max_buf_len
        members = self.members
        return broadcast_object(obj, members.group.ranks[root], "bcast_obj", members)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects by rank on rank `root`, and None on other ranks."""
        found = allgather_object(obj, "gather_obj", self.members)
        return found if self.rank == root else None

    def allreduce_obj(self, obj: Any) -> Any:
        """Return the sum of all ranks' objects, added with + in the order of ranks."""
        return functools.reduce(operator.add, allgather_object(obj, "allreduce_obj", self.members))

    # ---- models ----

    def bcast_data(self, model: Any) -> None:
        """Overwrite the parameters of `model` on all ranks with those of rank 0.

        Raises:
            MismatchError: on every rank: the ranks' models differ.
        """
        members = self.members
        self._require_alike("bcast_data", form_of(model))
        for name, parameter in parameters_of(model):
            root = members.group.ranks[0]
            found = array_collectives.broadcast(parameter.array, root, name=f"bcast_data{name}", process_set=members)
            if members.rank:
                parameter.array[...] = found

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:  # noqa: FBT001, FBT002 -- ChainerMN's
        """Overwrite the model's gradients with the average over all ranks.

        Args:
            model: a model with the same parameters on all ranks.
            zero_fill: see ModelGradients.start.

        Raises:
            MismatchError: on every rank: the ranks' models differ.
        """
        gradients = self.gradients_of(model)
        gradients.start(model, zero_fill=zero_fill)
        give(model, gradients.finish() or ())
        if chainer.is_debug():
            self._require_finite(model)

    def gradients_of(self, model: Any) -> ModelGradients:
        """Return the gradient reduction for models with the parameters of `model`.

        It is made once for each set of names, shapes and types.
        """
        members = self.members
        kept, form = self._kept(members), form_of(model)
        if form not in kept.gradients:
            is_short = self._gradient_dtype is not None and np.dtype(self._gradient_dtype) == np.float16
            kept.gradients[form] = ModelGradients(form, members, WireOnly("fp16") if is_short else None)
        return kept.gradients[form]

    def _multi_node_mean(self, sendbuf: Array | None, recvbuf: Array) -> None:
        """Overwrite `recvbuf` with the mean of all ranks' `sendbuf` (default: `recvbuf`). ChainerMN calls this."""
        given = recvbuf if sendbuf is None else sendbuf
        recvbuf[...] = array_collectives.allreduce(given, "average", process_set=self.members)

    # ---- the common path ----

    @property
    def _messages(self) -> Messages:
        return self._kept(self.members).messages

    def _kept(self, members: Members) -> "_OfMembership":
        found = self._by_members.get(members)
        if found is None:
            found = self._by_members[members] = _OfMembership(members)
        return found

    def _shapes(self, what: str, own: Array) -> list[tuple[int, ...]]:
        told = allgather_object((own.shape, own.dtype.name), what, self.members)
        dtypes = [dtype for _, dtype in told]
        if len(set(dtypes)) > 1:
            raise MismatchError(f"{what}: the ranks' arrays are of different types, by rank {dtypes}")
        return [shape for shape, _ in told]

    def _require_alike(self, what: str, form: Sequence[Any]) -> None:
        with internal_errors(what):
            require_alike(self.members.group, what, [f"{name}, {kind} of {shape}" for name, shape, kind in form])

    def _require_finite(self, model: Any) -> None:
        for name, parameter in parameters_of(model):
            if parameter.grad is not None and not np.isfinite(parameter.grad).all():
                raise ValueError(f"Parameters diverged after allreduce: the gradient of {name} is not finite")


class _OfMembership:
    """The message queues and gradient reductions of one membership."""

    def __init__(self, members: Members) -> None:
        self.messages = Messages(members.group.twin_for("messages of ChainerMN's communicators"))
        self.gradients: dict[Any, ModelGradients] = {}


def _array(what: str, data: Any) -> Array:
    if isinstance(data, chainer.Variable):
        data = data.array
    if isinstance(data, tuple | list) or not isinstance(data, np.ndarray | np.generic | float | int):
        raise ArgumentError(f"{what} of {type(data).__name__}: want a NumPy array")
    return np.asarray(data)


def _parted(flat: Array, shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return tuple(part.reshape(shape) for part, shape in zip(np.split(np.array(flat), ends), shapes, strict=True))
