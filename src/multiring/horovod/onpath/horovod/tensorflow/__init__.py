"""multiring.tensorflow under Horovod's name, for programs written for Horovod."""

from horovod.tensorflow import compression as compression
from horovod.tensorflow import elastic as elastic
from horovod.tensorflow import functions as functions
from horovod.tensorflow import mpi_ops as mpi_ops
from horovod.tensorflow import sync_batch_norm as sync_batch_norm
from horovod.tensorflow import util as util
from horovod.tensorflow.mpi_ops import check_num_rank_power_of_2 as check_num_rank_power_of_2
from horovod.tensorflow.mpi_ops import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from horovod.tensorflow.util import _cache as _cache
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from horovod.tensorflow.util import _make_subgraph as _make_subgraph
from horovod.tensorflow.util import refs_to_vars as refs_to_vars
from horovod.tensorflow.util import vars_to_refs as vars_to_refs
from multiring._frontend.build_questions import *  # noqa: F403 -- what the adapter's public names leave out
from multiring.horovod.arguments import split_list as split_list
from multiring.horovod.builds import check_extension as check_extension
from multiring.horovod.builds import gpu_available as gpu_available
from multiring.tensorflow import *  # noqa: F403 -- all public names
