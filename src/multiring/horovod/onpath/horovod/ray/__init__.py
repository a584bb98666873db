"""Horovod on Ray (docs/guide_ray.md)."""

from multiring.horovod.ray_executor import ElasticRayExecutor, RayExecutor

__all__ = ["ElasticRayExecutor", "RayExecutor"]
