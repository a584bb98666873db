"""Broadcast parameters, optimizer state and objects to all ranks."""

from multiring.torch import allgather_object as allgather_object
from multiring.torch import broadcast_object as broadcast_object
from multiring.torch import broadcast_parameters as broadcast_parameters
from multiring.torch.gradients.lenient import broadcast_optimizer_state as broadcast_optimizer_state
