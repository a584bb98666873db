"""The module from which some programs import RayExecutor."""

from multiring.horovod.ray_executor import RayExecutor

__all__ = ["RayExecutor"]
