"""PyTorch: train one model on many ranks, with Horovod's names.

    import multiring.torch as mt

    mt.init()
    mt.broadcast_parameters(model.state_dict())
    optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())

Each rank then trains on its own samples; `loss.backward()` leaves the average of all ranks' gradients.
"""

from multiring.runtime import init as init
from multiring.runtime import is_initialized as is_initialized
from multiring.runtime import local_rank as local_rank
from multiring.runtime import local_size as local_size
from multiring.runtime import rank as rank
from multiring.runtime import shutdown as shutdown
from multiring.runtime import size as size
from multiring.torch.broadcasting import broadcast_parameters as broadcast_parameters
from multiring.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from multiring.torch.optimizer import gradient_bytes as gradient_bytes
from multiring.torch.optimizer_state import broadcast_optimizer_state as broadcast_optimizer_state
from multiring.torch.options import PowerSGD as PowerSGD
from multiring.torch.reducing import allreduce as allreduce
from multiring.torch.reducing import allreduce_ as allreduce_
from multiring.torch.timeline import start_timeline as start_timeline
from multiring.torch.timeline import stop_timeline as stop_timeline

__all__ = [
    "DistributedOptimizer",
    "PowerSGD",
    "allreduce",
    "allreduce_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "gradient_bytes",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
