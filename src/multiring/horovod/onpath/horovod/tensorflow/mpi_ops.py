"""Collectives on tensors, and functions for ranks and sizes."""

from horovod.common.basics import HorovodBasics as _HorovodBasics
from horovod.tensorflow.util import _executing_eagerly
from multiring import tensorflow
from multiring._frontend.build_questions import *  # noqa: F403 -- what the adapter's public names leave out
from multiring.horovod.arguments import get_average_backwards_compatibility_fun, num_rank_is_power_2
from multiring.tensorflow import *  # noqa: F403 -- all public names

_basics = _HorovodBasics(__file__, "mpi_lib")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(tensorflow)
check_num_rank_power_of_2 = num_rank_is_power_2
