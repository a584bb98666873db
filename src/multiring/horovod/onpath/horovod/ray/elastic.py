"""The module from which some programs import ElasticRayExecutor, which is refused."""

from multiring.horovod.ray_executor import ElasticRayExecutor

__all__ = ["ElasticRayExecutor"]
