"""multiring.torch under Horovod's name, for programs written for Horovod."""

from multiring._frontend.build_questions import *  # noqa: F403 -- what the adapter's public names leave out
from multiring.torch import *  # noqa: F403 -- all names, except those imported below

# isort: split
import horovod.torch.elastic as elastic  # type: ignore[no-redef] # noqa: F401, PLR0402 -- the name has a value already
from horovod.torch import compression as compression
from horovod.torch import functions as functions
from horovod.torch import mpi_ops as mpi_ops
from horovod.torch import optimizer as optimizer
from horovod.torch import sync_batch_norm as sync_batch_norm
from multiring.horovod.builds import check_extension as check_extension
from multiring.torch import HorovodInternalError as HorovodInternalError
from multiring.torch.gradients.lenient import DistributedOptimizer as DistributedOptimizer
from multiring.torch.gradients.lenient import broadcast_optimizer_state as broadcast_optimizer_state
