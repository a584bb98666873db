"""Programs that leave their job and use their old functions in the next job."""

import os
from typing import Any

import numpy as np
from tests.support.ranks import Here

from multiring._settings import environment_of


def rejoin(adapter: Any, here: Here, ranks: int) -> bool:
    """Leave the job and join a new job of its first `ranks` ranks.

    Return whether this rank is in the new job.
    """
    adapter.shutdown()
    if here.rank >= ranks:
        return False
    place = f"{os.environ['MULTIRING_RENDEZVOUS']}-again"
    os.environ.update(environment_of(rank=here.rank, size=ranks, rendezvous=place, job=place[1:]))
    adapter.init()
    return True


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the results in which two runs of the same programs differ."""
    return {name: (found[name], each) for name, each in wanted.items() if found[name] != each}


def with_jax(here: Here) -> None:
    import jax  # noqa: PLC0415 -- only ranks import it

    import multiring.jax as mj  # noqa: PLC0415 -- as above

    mj.init()
    programs: dict[str, Any] = {
        "all_gather": jax.jit(mj.allgather),
        "all_reduce": jax.jit(lambda x: mj.allreduce(mj.broadcast(x, 1))),
        "broadcast's gradient": jax.jit(jax.grad(lambda x: (mj.broadcast(x, 1) ** 2).sum())),
        "eager": mj.allgather,
    }
    x = jax.numpy.arange(2.0) + here.rank

    def require_right(ranks: int) -> None:
        found = {name: np.asarray(each(x)).tolist() for name, each in programs.items()}
        assert found["all_gather"] == found["eager"] == [row + rank for rank in range(ranks) for row in (0.0, 1.0)]
        assert found["all_reduce"] == [1.0, 2.0]
        assert found["broadcast's gradient"] == ([2.0, 4.0] if here.rank == 1 else [0.0, 0.0])

    require_right(3)
    if rejoin(mj, here, 2):
        require_right(2)


def with_tensorflow(here: Here) -> None:
    import tensorflow as tf  # noqa: PLC0415 -- only ranks import it

    import multiring.tensorflow as mtf  # noqa: PLC0415 -- as above

    mtf.init()

    def gradient(function: Any) -> Any:
        def of(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) ** 2)
            return tape.gradient(loss, x)

        return of

    variable = tf.Variable(1.0)

    def own(x: Any) -> Any:
        with mtf.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.register_local_source(variable)
            loss = variable * tf.reduce_sum(x)
        return tape.gradient(loss, [variable])[0]

    def sparse(x: Any) -> Any:
        return mtf.allreduce(tf.IndexedSlices(x, tf.range(6), tf.constant([6]))).values

    plain = {
        "alltoall": mtf.alltoall,
        "slices": sparse,
        "a local gradient": own,
        "allgather's gradient": gradient(mtf.allgather),
        "broadcast's gradient": gradient(lambda x: mtf.broadcast(x, 1)),
        "reducescatter's gradient": gradient(lambda x: mtf.reducescatter(x, op=mtf.Sum)),
    }
    x = tf.range(6.0) + float(here.rank)

    def found(programs: dict[str, Any]) -> dict[str, Any]:
        return {name: each(x).numpy().tolist() for name, each in programs.items()}

    graphs = {name: tf.function(each, autograph=False) for name, each in plain.items()}
    found(graphs)
    if rejoin(mtf, here, 2):
        assert not differing(found(graphs), found(plain))
