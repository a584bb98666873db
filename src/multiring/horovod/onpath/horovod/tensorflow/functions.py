"""Broadcast variables and objects to all ranks."""

from multiring.tensorflow.functions import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
