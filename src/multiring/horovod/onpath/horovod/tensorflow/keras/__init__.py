"""multiring.keras, for programs that were written for Horovod."""

from horovod.tensorflow.keras import callbacks as callbacks
from horovod.tensorflow.keras import elastic as elastic
from multiring.keras import *  # noqa: F403 -- all of it
