"""JAX's platforms that multiring serves, and this rank's GPU.

Arrays on CUDA devices pass through pinned host memory.
"""

import logging

import jax
from jax._src import xla_bridge

from multiring._frontend import lifecycle
from multiring._runtime.engines.nvml import visible_gpus
from multiring._settings import inherited_environment

PLATFORMS = ("cpu", "cuda")
_log = logging.getLogger("multiring")
_VISIBLE = "jax_cuda_visible_devices"
_ALL = "all"


def platform_here() -> str:
    """Return the platform on which JAX computes here, as JAX's lowering rules name it: cpu, cuda, rocm, tpu, ..."""
    platform = jax.default_backend()
    if platform != "gpu":
        return platform
    return "cuda" if "cuda" in jax.devices()[0].client.platform_version.lower() else "rocm"


def choose_gpu() -> None:
    """Let JAX see one GPU of this host: that of this rank's number among its ranks, modulo the number of GPUs.

    Nothing changes if this process sees at most one GPU, if the program has set `jax_cuda_visible_devices`, or if JAX
    has started already. CUDA_VISIBLE_DEVICES stays as it is.
    """
    if xla_bridge.backends_are_initialized() or xla_bridge.CUDA_VISIBLE_DEVICES.value != _ALL:
        return
    gpus, rank, ranks = visible_gpus(inherited_environment()), lifecycle.local_rank(), lifecycle.local_size()
    if gpus < 2:  # no choice
        return
    if gpus < ranks and rank == 0:
        _log.warning("%d ranks of this host share %d GPUs: set XLA_PYTHON_CLIENT_PREALLOCATE=false", ranks, gpus)
    jax.config.update(_VISIBLE, str(rank % gpus))
