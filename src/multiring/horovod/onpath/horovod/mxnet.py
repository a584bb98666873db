"""multiring has no adapter for MXNet: importing this module raises ImportError."""

raise ImportError(
    "horovod.mxnet: multiring has no adapter for MXNet yet; horovod.torch, horovod.tensorflow and "
    "horovod.keras are there",
    name="horovod.mxnet",
)
