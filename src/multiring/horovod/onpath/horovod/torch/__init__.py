"""multiring.torch under Horovod's name, for programs written for Horovod."""

from multiring._frontend.build_questions import *  # noqa: F403 -- what the adapter's public names leave out
from multiring.torch import *  # noqa: F403 -- all names, except those imported below

# isort: split
import horovod.torch.elastic as elastic  # type: ignore[no-redef] # noqa: PLR0402 -- the name has a value already
from horovod.torch import compression, functions, mpi_ops, optimizer, sync_batch_norm
from multiring.horovod.builds import check_extension
from multiring.torch import HorovodInternalError
from multiring.torch.gradients.lenient import DistributedOptimizer, broadcast_optimizer_state
