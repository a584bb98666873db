"""ChainerMN's datasets, which work with any communicator."""

from chainermn.datasets import DataSizeError, create_empty_dataset, scatter_dataset, scatter_index

__all__ = ["DataSizeError", "create_empty_dataset", "scatter_dataset", "scatter_index"]
