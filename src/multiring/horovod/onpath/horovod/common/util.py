"""Utility functions that scripts import from Horovod."""

import functools

from multiring.horovod.arguments import env as env
from multiring.horovod.arguments import (
    get_average_backwards_compatibility_fun as get_average_backwards_compatibility_fun,
)
from multiring.horovod.arguments import is_iterable as is_iterable
from multiring.horovod.arguments import num_rank_is_power_2 as num_rank_is_power_2
from multiring.horovod.arguments import split_list as split_list
from multiring.horovod.builds import ADAPTERS
from multiring.horovod.builds import ccl_built as ccl_built
from multiring.horovod.builds import check_extension as check_extension
from multiring.horovod.builds import check_installed_version as check_installed_version
from multiring.horovod.builds import ddl_built as ddl_built
from multiring.horovod.builds import extension_available as extension_available
from multiring.horovod.builds import get_ext_suffix as get_ext_suffix
from multiring.horovod.builds import get_extension_full_path as get_extension_full_path
from multiring.horovod.builds import gloo_built as gloo_built
from multiring.horovod.builds import gpu_available as gpu_available
from multiring.horovod.builds import is_version_greater_equal_than as is_version_greater_equal_than
from multiring.horovod.builds import mpi_built as mpi_built
from multiring.horovod.builds import nccl_built as nccl_built

EXTENSIONS = list(ADAPTERS)
_cache = functools.cache  # programs import it, although its name is private
