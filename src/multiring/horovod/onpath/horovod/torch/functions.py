"""Broadcast parameters, optimizer state and objects to all ranks."""

from multiring.torch import allgather_object, broadcast_object, broadcast_parameters
from multiring.torch.gradients.lenient import broadcast_optimizer_state
