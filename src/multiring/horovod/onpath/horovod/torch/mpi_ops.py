"""Collectives on tensors, and functions for ranks and sizes."""

from multiring import torch
from multiring._frontend.build_questions import *  # noqa: F403 -- what the adapter's public names leave out
from multiring.horovod.arguments import get_average_backwards_compatibility_fun
from multiring.torch import *  # noqa: F403 -- all public names
from multiring.torch import HorovodInternalError

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(torch)
