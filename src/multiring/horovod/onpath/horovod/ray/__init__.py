"""Horovod on Ray (docs/guide_ray.md)."""

from multiring.horovod.ray_executor import RayExecutor

__all__ = ["RayExecutor"]
