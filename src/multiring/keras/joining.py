"""init for Keras: it calls `init` of the backend's adapter, which also sets up the backend."""

from typing import Any

import keras

from multiring._frontend import lifecycle


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; see `multiring._frontend.lifecycle.init`.

    On TensorFlow, see also `multiring.tensorflow.init` for its thread pools.
    """
    if keras.backend.backend() == "tensorflow":
        from multiring.tensorflow import joining  # noqa: PLC0415 -- an optional framework

        joining.init(comm, process_sets)
    elif keras.backend.backend() == "jax":
        from multiring.jax import joining as joining_by_jax  # noqa: PLC0415 -- an optional framework

        joining_by_jax.init(comm, process_sets)
    else:
        lifecycle.init(comm, process_sets)
