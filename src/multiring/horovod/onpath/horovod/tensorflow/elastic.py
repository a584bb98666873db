"""Training that continues after a failure."""

from multiring.tensorflow.elastic import ObjectState as ObjectState
from multiring.tensorflow.elastic import TensorFlowKerasState as TensorFlowKerasState
from multiring.tensorflow.elastic import TensorFlowState as TensorFlowState
from multiring.tensorflow.elastic import run as run
