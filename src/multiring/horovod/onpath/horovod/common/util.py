"""Utility functions that scripts import from Horovod."""

import functools

from multiring.horovod.arguments import (
    env,
    get_average_backwards_compatibility_fun,
    is_iterable,
    num_rank_is_power_2,
    split_list,
)
from multiring.horovod.builds import (
    ADAPTERS,
    ccl_built,
    check_extension,
    check_installed_version,
    ddl_built,
    extension_available,
    get_ext_suffix,
    get_extension_full_path,
    gloo_built,
    gpu_available,
    is_version_greater_equal_than,
    mpi_built,
    nccl_built,
)

EXTENSIONS = list(ADAPTERS)
_cache = functools.cache  # programs import it, although its name is private
