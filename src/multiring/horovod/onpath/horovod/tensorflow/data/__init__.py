"""multiring has no compute service for tf.data: the import raises ImportError."""

raise ImportError(
    "horovod.tensorflow.data: multiring has no compute service for tf.data; give each rank its shard, "
    "`dataset.shard(hvd.size(), hvd.rank())`, or use multiring.data",
    name="horovod.tensorflow.data",
)
