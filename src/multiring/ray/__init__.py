"""Ray: run a function as the ranks of a job, on the workers of a Ray cluster.

    import multiring.ray, ray

    ray.init()
    accuracies = multiring.ray.run(train, workers=4, kwargs={"rate": 0.1})

Importing this package does not import Ray.
"""

from multiring._former_names import keep_to_public_names
from multiring.ray.running import run

__all__ = ["run"]

keep_to_public_names(__name__)
