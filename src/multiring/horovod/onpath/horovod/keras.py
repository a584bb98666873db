"""Not there."""

raise ImportError("horovod.keras: multiring has no adapter for Keras yet; horovod.torch is there", name="horovod.keras")
