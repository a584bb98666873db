"""distribute: make an optimizer use all ranks' gradients, with the call of the other adapters."""

from typing import Any

import numpy as np

from multiring._frontend.compression_names import Compression, wire_of
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.chainer.communicator import Communicator
from multiring.chainer.optimizers import create_multi_node_optimizer
from multiring.errors import UnsupportedError


def distribute(
    optimizer: Any,
    *,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    double_buffering: bool = False,
) -> Any:
    """Return an optimizer that updates with the average of all ranks' gradients.

    The first `update` broadcasts the parameters of rank 0. See `create_multi_node_optimizer`, which does the same with
    a communicator.

    Args:
        optimizer: an optimizer of chainer.optimizers.
        compression: the type of float32 gradients between hosts: Compression.none or .fp16, or its name.
        process_set: by default, all ranks.
        double_buffering: whether a step uses the averages of the previous step.

    Raises:
        ArgumentError: `compression` is unknown, or this rank is not in the set.
        UnsupportedError: `compression` is bf16 or int8.
    """
    wire = wire_of(compression)
    if wire not in {None, "fp16"}:
        raise UnsupportedError(
            f"compression={compression!r}: Chainer's gradients travel as float32 or float16; want none or fp16"
        )
    communicator = Communicator(process_set, np.float16 if wire else None)
    return create_multi_node_optimizer(optimizer, communicator, double_buffering)
