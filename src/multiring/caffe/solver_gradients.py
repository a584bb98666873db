"""distribute: make a solver use the average of all ranks' gradients."""

import hashlib
import logging
from typing import Any

import caffe

from multiring._frontend import array_collectives
from multiring._frontend.compression_names import Compression, wire_of
from multiring._frontend.consistency_check import require_alike
from multiring._frontend.errors import internal_errors
from multiring._frontend.former_arguments import former_arguments
from multiring._frontend.object_collectives import allgather_object
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._gradients.buckets import BUCKET_BYTES, GradientSpec
from multiring._gradients.options import GradientOptions, WireOnly
from multiring._gradients.reducer import GradientReducer
from multiring.errors import ArgumentError

_log = logging.getLogger("multiring")
_MARK = "_multiring_gradients"


@former_arguments(wire="compression")
def distribute(
    solver: Any, *, compression: Any = Compression.none, process_set: ProcessSet = global_process_set
) -> Any:
    """Make `solver` update with the average of all ranks' gradients, and return it.

    All ranks must call this.

    All ranks get the parameters of rank 0. Caffe applies its later stages (iter_size, clipping, regularization,
    momentum) to the average. Parameters that several layers share are averaged once.

    In Caffe, `solve` and `snapshot` abort the process on ranks other than 0. The returned solver replaces them: on
    these ranks `solve` makes the steps only, and `snapshot` does nothing.

    At the first step the ranks compare the records that their data layers have read. If all ranks have read the same
    records, rank 0 prints a warning. The usual cause is a solver that was made before `init`.

    Args:
        solver: a solver of pycaffe on the CPU, made after `multiring.caffe.init`.
        compression: the type of gradients between hosts: a member of `Compression`, or its name.
        process_set: by default, all ranks. See `set_solver_rank`.

    Raises:
        ArgumentError: `solver` is not a solver of pycaffe or is distributed already; `compression` is unknown; or
            Caffe's number of solvers on this thread is not the number of ranks.
        MismatchError: on every rank: the ranks' nets differ.
    """
    if not all(hasattr(solver, name) for name in ("add_callback", "net", "step")):
        raise ArgumentError(f"distribute takes a solver of pycaffe, as caffe.get_solver makes; got a {type(solver)}")
    if getattr(solver, _MARK, None) is not None:
        raise ArgumentError("distribute was already called for this solver; call it once for each solver")
    members = members_of(process_set)
    told = getattr(caffe, "solver_count", lambda: members.size)()
    if told != members.size:
        raise ArgumentError(
            f"distribute: Caffe counts {told} solvers on this thread, but there are {members.size} ranks, so all ranks "
            "would train on the same records. Call multiring.caffe.set_solver_rank() on this thread, then make the "
            "solver"
        )
    shared_gradients = SolverGradients(solver, wire_of(compression), process_set)
    shared_gradients.broadcast()
    solver.add_callback(shared_gradients.on_start, shared_gradients.on_gradients_ready)
    setattr(solver, _MARK, shared_gradients)  # keeps the owner of the callbacks alive, because Caffe holds no reference
    solver.solve, solver.snapshot = _solve_of(solver, process_set), _snapshot_of(solver, process_set)
    return solver


def _solve_of(solver: Any, process_set: ProcessSet) -> Any:
    """Return a `solve` that trains to the end on every rank, and tests and writes snapshots on rank 0 only."""
    whole = solver.solve

    def solve(resume_file: str | None = None) -> None:
        """Train until max_iter; see `distribute`."""
        if members_of(process_set).rank == 0:
            whole(resume_file) if resume_file else whole()
            return
        if resume_file:
            solver.restore(resume_file)
        solver.step(max(0, solver.param.max_iter - solver.iter))

    return solve


def _snapshot_of(solver: Any, process_set: ProcessSet) -> Any:
    """Return a `snapshot` that writes a snapshot on rank 0 and does nothing on other ranks."""
    write = solver.snapshot

    def snapshot() -> None:
        """Write a snapshot on rank 0; see `distribute`."""
        if members_of(process_set).rank == 0:
            write()

    return snapshot


def parameters_of(net: Any) -> list[tuple[str, Any]]:
    """Return the net's parameters as ("layer.number", blob).

    If blobs share memory, only the first of them is listed.
    """
    found, seen = [], set()
    for layer, blobs in net.params.items():
        for number, blob in enumerate(blobs):
            data = blob.data
            address = data.__array_interface__["data"][0]
            if data.size and address in seen:
                continue
            seen.add(address)
            found.append((f"{layer}.{number}", blob))
    return found


class SolverGradients:
    """Broadcasts parameters of a solver's net, and averages their gradients."""

    def __init__(self, solver: Any, wire: str | None, process_set: ProcessSet) -> None:
        """Store the arguments of `distribute`, without communication."""
        self._has_compared = False
        self._net = solver.net
        self._compression = None if wire is None else WireOnly(wire)
        self._process_set = process_set
        self._members: Members | None = None
        self._reducer: GradientReducer | None = None

    def broadcast(self) -> None:
        """Overwrite the parameters of all ranks with those of rank 0.

        Raises:
            MismatchError: on every rank: the ranks' nets differ.
        """
        members = members_of(self._process_set)
        parameters = parameters_of(self._net)
        with internal_errors("distribute"):
            lines = [f"{name}, of shape {tuple(blob.data.shape)}" for name, blob in parameters]
            require_alike(members.group, "distribute", lines)
        for name, blob in parameters:
            root = members.group.ranks[0]
            found = array_collectives.broadcast(blob.data, root, name=f"caffe.{name}", process_set=members)
            if members.rank:
                blob.data[...] = found

    def on_start(self) -> None:
        """Do nothing. Caffe calls this before a step's first forward pass."""

    def on_gradients_ready(self) -> None:
        """Overwrite the gradients with the average over all ranks.

        Caffe calls this before it updates parameters.

        Raises:
            CollectiveError: on every rank: the ranks disagree, or a rank is lost.
        """
        parameters = parameters_of(self._net)
        if not self._has_compared:
            self._has_compared = True
            self._compare_records()
        reducer = self._reducer_now(parameters)
        shared = reducer.reduce([blob.diff for _, blob in parameters])
        for (_, blob), gradient in zip(parameters, shared, strict=True):
            if gradient is not None:
                blob.diff[...] = gradient

    def _compare_records(self) -> None:
        """Warn if the data layers (layers without inputs) of all ranks have read the same records."""
        members = members_of(self._process_set)
        if members.size == 1:
            return
        net = self._net
        names = getattr(net, "_layer_names", ())
        read = [top for name in names if not net.bottom_names[name] for top in net.top_names[name]]
        digest = hashlib.blake2b(digest_size=16)
        for name in read:
            digest.update(net.blobs[name].data.tobytes())
        with internal_errors("distribute"):
            every = allgather_object(digest.digest() if read else None, "caffe.records", members)
        if read and len(set(every)) == 1 and members.rank == 0:
            _log.warning(
                "all %d ranks have read the same records in their first step: make the solver after "
                "multiring.caffe.init(), on the same thread; the program itself must shard Python and image layers",
                members.size,
            )

    def _reducer_now(self, parameters: list[tuple[str, Any]]) -> GradientReducer:
        """Return the reducer for the current members, and make a new one if the members have changed."""
        members = members_of(self._process_set)
        if self._reducer is None or members is not self._members:
            specs = [(name, GradientSpec.row_major("float32", blob.diff.shape)) for name, blob in parameters]
            options = GradientOptions(op="average", bucket_bytes=BUCKET_BYTES, compression=self._compression)
            self._reducer = GradientReducer(
                specs, members.group, options, parameters=lambda: [blob.data for _, blob in parameters_of(self._net)]
            )
            members.reducers.add(self._reducer)
            self._members = members
        return self._reducer
