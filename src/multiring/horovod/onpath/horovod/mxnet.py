"""Not there."""

raise ImportError("horovod.mxnet: multiring has no adapter for MXNet yet; horovod.torch is there", name="horovod.mxnet")
