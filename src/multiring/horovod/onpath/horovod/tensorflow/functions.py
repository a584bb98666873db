"""Broadcast variables and objects to all ranks."""

from multiring.tensorflow.functions import allgather_object as allgather_object
from multiring.tensorflow.functions import broadcast_object as broadcast_object
from multiring.tensorflow.functions import broadcast_object_fn as broadcast_object_fn
from multiring.tensorflow.functions import broadcast_variables as broadcast_variables
