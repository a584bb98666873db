"""The places for training data: folders and URLs."""

from multiring.horovod.spark_store import FilesystemStore, LocalStore, Store

__all__ = ["FilesystemStore", "LocalStore", "Store"]
