"""Not there."""

raise ImportError(
    "horovod.tensorflow: multiring has no adapter for TensorFlow yet; horovod.torch is there", name="horovod.tensorflow"
)
