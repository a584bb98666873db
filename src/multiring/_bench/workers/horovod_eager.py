"""Time one of Horovod's collectives on TensorFlow's eager tensors.

See contract.py.

Eager tensors are values: Horovod returns the result in a new tensor, and cannot work in place. Each tensor has the same
name in every call; otherwise Horovod would negotiate each call anew instead of answering from its response cache.
Arguments are as for mpi.py. (The file is not called horovod.py, because it would shadow the package.)
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

if TYPE_CHECKING:
    from multiring._bench.workers import contract
else:
    import contract  # beside this script, which may run where multiring is not installed

OPS = {"sum": "Sum", "average": "Average", "min": "Min", "max": "Max", "product": "Product"}
# reducescatter supports only these: https://horovod.readthedocs.io/en/stable/api.html
OPS_OF_REDUCE_SCATTER = ("sum", "average")
# horovod/common/message.h lacks these types.
NOT_A_TYPE = ("bfloat16",)

Call = Callable[[int, Any], Any]


def make_call(case: contract.Case, rank: int) -> Call:
    """Return a function that runs the collective on a tensor, under an index's name, and returns the result."""
    if case.collective == "barrier":
        contract.refuse(case, rank, "Horovod has a barrier for PyTorch, not for TensorFlow")
    if case.dtype in NOT_A_TYPE:
        contract.refuse(case, rank, f"Horovod has no {case.dtype} among its types")
    if case.collective == "reduce_scatter" and case.op not in OPS_OF_REDUCE_SCATTER:
        contract.refuse(case, rank, f"Horovod's reducescatter has no {case.op}")
    op = getattr(hvd, OPS[case.op])
    calls: dict[str, Call] = {
        "all_reduce": lambda index, tensor: hvd.allreduce(tensor, op=op, name=f"b{index}"),
        "reduce_scatter": lambda index, tensor: hvd.reducescatter(tensor, op=op, name=f"b{index}"),
        "all_gather": lambda index, tensor: hvd.allgather(tensor, name=f"b{index}"),
        "broadcast": lambda index, tensor: hvd.broadcast(tensor, case.root, name=f"b{index}"),
        "all_to_all": lambda index, tensor: hvd.alltoall(tensor, name=f"b{index}"),
    }
    return calls[case.collective]


def confine(case: contract.Case) -> None:
    """Bind every thread that this process has by now to all of the case's cores.

    A rank of Horovod has two threads that wait for each other, the program's thread and the communicating thread. On
    one core a small all-reduce takes several times as long.
    """
    for thread in Path("/proc/self/task").iterdir() if case.cores else ():
        os.sched_setaffinity(int(thread.name), case.cores)


def main(case: contract.Case) -> None:
    """Time the case, and write the answer."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    confine(case)
    call = make_call(case, rank)
    source, want = contract.inputs(case, rank, ranks), contract.expected(case, rank, ranks)
    tensors = [tf.constant(source) for _ in range(contract.num_buffers(case))]
    for index, tensor in enumerate(tensors):
        contract.verify(case, rank, call(index, tensor).numpy(), want)
    token = tf.zeros(1)
    seconds = contract.time_calls(
        lambda index: call(index, tensors[index]), lambda: hvd.allreduce(token, name="barrier"), case
    )
    settings = dict(word.split("=", 1) for word in sys.argv[2:])
    settings["buffers"] = "a new tensor for each result: eager tensors cannot be written in place"
    version = f"Horovod {horovod.__version__}, Gloo controller, TensorFlow {tf.__version__}"
    contract.write_result(case, rank, seconds, version, settings)
    hvd.shutdown()


if __name__ == "__main__":
    contract.run_cases(main)
