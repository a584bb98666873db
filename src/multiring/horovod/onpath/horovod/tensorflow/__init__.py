"""multiring.tensorflow under Horovod's name, for programs written for Horovod."""

from horovod.tensorflow import compression, elastic, functions, mpi_ops, sync_batch_norm, util
from horovod.tensorflow.mpi_ops import check_num_rank_power_of_2, handle_average_backwards_compatibility
from horovod.tensorflow.util import _cache, _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs
from multiring._frontend.build_questions import *  # noqa: F403 -- what the adapter's public names leave out
from multiring.horovod.arguments import split_list
from multiring.horovod.builds import check_extension, gpu_available
from multiring.tensorflow import *  # noqa: F403 -- all public names
