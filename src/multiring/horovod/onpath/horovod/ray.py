"""Not there."""

raise ImportError("horovod.ray: multiring has no adapter for Ray yet; horovod.torch is there", name="horovod.ray")
