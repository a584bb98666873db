"""multiring has no adapter for Ray: importing this module raises ImportError."""

raise ImportError(
    "horovod.ray: multiring has no adapter for Ray yet; horovod.torch, horovod.tensorflow and horovod.keras are there",
    name="horovod.ray",
)
