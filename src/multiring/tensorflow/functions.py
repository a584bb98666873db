"""Broadcast variables and objects; return ranks and sizes as operations."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multiring._frontend import object_collectives
from multiring._frontend.lifecycle import local_rank, local_size, rank
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of, numbered_set
from multiring._frontend.variable_names import names_of_variables
from multiring.tensorflow.asking import asked
from multiring.tensorflow.collectives import broadcast_named


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Set `variables` on all ranks to the values on rank `root_rank`.

    There is one collective for each type.

    Args:
        variables: variables of TensorFlow or Keras, the same on all ranks, in the same order. The ranks compare their
            names, without the numbers by which a process tells layers of one kind apart.
        root_rank: the rank's number in the whole job.
        process_set: by default, all ranks.
        inplace: not used, because values are always assigned.

    Returns:
        In a graph of TensorFlow 1, the operation that sets the variables; otherwise None.

    Raises:
        tf.errors.OpError: on every rank: the ranks' variables differ in names, shapes or types, or a rank is lost.
    """
    del inplace
    found = [getattr(variable, "value", variable) if _is_keras(variable) else variable for variable in variables]
    if not found:
        return None
    assigned = broadcast_named(found, names_of_variables(variables), root_rank, None, process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


def _is_keras(variable: Any) -> bool:
    return type(variable).__module__.startswith("keras")


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that broadcasts the global variables of a graph.

    It sets the variables of a TensorFlow 1 graph to those of rank `root_rank`.

    Raises:
        RuntimeError: execution is eager, and has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc] # TensorFlow has no types
    """Broadcasts the global variables of rank `root_rank`.

    This happens after the session is created and its variables are initialised or restored.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Make a hook for tf.compat.v1.train.MonitoredTrainingSession.

        `device` is an argument of tf.device.
        """
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the broadcast operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:  # noqa: ARG002 -- part of the contract
        """Run the broadcast operation."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the `obj` of rank `root_rank`.

    See `multiring._frontend.object_collectives`. `session` is not used.
    """
    del session
    return object_collectives.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that calls `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the `obj` of every rank, ordered by rank. `session` is not used."""
    del session
    return object_collectives.allgather_object(obj, name, process_set)


# ---- ranks and sizes as operations, for a graph that runs again after the job has changed ----


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return an operation that gives the number of ranks of a process set.

    The operation reads the number when it runs. The type is int32.
    """
    return asked(lambda: members_of(numbered_set(process_set_id)).size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return an operation that gives 1 if this rank is in a process set, else 0.

    The operation checks the set when it runs. The type is int32.
    """
    return asked(lambda: int(bool(numbered_set(process_set_id).included())), name)


def local_size_op(name: str | None = None) -> Any:
    """Return an operation that gives the number of ranks on this host.

    The operation reads the number when it runs. The type is int32.
    """
    return asked(local_size, name)


def rank_op(name: str | None = None) -> Any:
    """Return an operation that gives this process's rank at run time, as int32."""
    return asked(rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return an operation that gives this process's rank on its host.

    The operation reads the rank when it runs. The type is int32.
    """
    return asked(local_rank, name)
