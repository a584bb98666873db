"""Dask: run a function as the ranks of a job, on the workers of a Dask cluster.

    import dask.distributed, multiring.dask

    client = dask.distributed.Client("tcp://host0:8786")
    accuracies = multiring.dask.run(client, train, workers=4, kwargs={"rate": 0.1})

Importing this package does not import Dask.
"""

from multiring._former_names import keep_to_public_names
from multiring.dask.running import run

__all__ = ["run"]

keep_to_public_names(__name__)
