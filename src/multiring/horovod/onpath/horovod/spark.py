"""multiring has no adapter for Spark: importing this module raises ImportError."""

raise ImportError(
    "horovod.spark: multiring has no adapter for Spark yet; horovod.torch, horovod.tensorflow and "
    "horovod.keras are there",
    name="horovod.spark",
)
