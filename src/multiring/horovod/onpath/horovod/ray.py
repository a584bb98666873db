"""Not there."""

raise ImportError(
    "horovod.ray: multiring has no adapter for Ray yet; horovod.torch, horovod.tensorflow and horovod.keras are there",
    name="horovod.ray",
)
