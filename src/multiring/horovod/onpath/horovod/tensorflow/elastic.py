"""Training that continues after a failure."""

from multiring.tensorflow.elastic import ObjectState, TensorFlowKerasState, TensorFlowState, run
