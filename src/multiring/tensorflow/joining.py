"""Join the job, and limit TensorFlow's threads.

The limit is this rank's share of the host's cores.
"""

import logging
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import core

from multiring._frontend import lifecycle
from multiring._frontend.requests.interrupts import fail_at_interrupts
from multiring._limits.rank_cores import cores_of_rank
from multiring._settings import foreign_environment

_log = logging.getLogger("multiring")
_LEAST_INTER = 1  # one thread is enough, because operations that wait for other ranks hold no thread


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; see `multiring._frontend.lifecycle.init`.

    TensorFlow's thread pools get this rank's share of the host's cores. The program, TF_NUM_INTRAOP_THREADS and
    TF_NUM_INTEROP_THREADS can set other numbers. If TensorFlow has computed already, its pools do not change.
    """
    lifecycle.init(comm, process_sets)
    errors = (tf.errors.OpError, core._NotOkStatusException)  # noqa: SLF001 -- eager operations raise it
    fail_at_interrupts([each.__init__.__code__.co_filename for each in errors])
    ranks = lifecycle.local_size()
    if ranks == 1:
        return
    share = max(1, int(cores_of_rank(ranks)))
    said = foreign_environment()
    threading = tf.config.threading
    try:
        if "TF_NUM_INTRAOP_THREADS" not in said and not threading.get_intra_op_parallelism_threads():
            threading.set_intra_op_parallelism_threads(share)
        if "TF_NUM_INTEROP_THREADS" not in said and not threading.get_inter_op_parallelism_threads():
            threading.set_inter_op_parallelism_threads(max(_LEAST_INTER, share))
    except RuntimeError:  # TensorFlow has created its pools already
        _log.info(
            "TensorFlow has computed before init, so each of this host's %d ranks computes on all of its cores", ranks
        )
