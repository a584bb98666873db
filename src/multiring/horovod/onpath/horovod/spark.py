"""Not there."""

raise ImportError("horovod.spark: multiring has no adapter for Spark yet; horovod.torch is there", name="horovod.spark")
