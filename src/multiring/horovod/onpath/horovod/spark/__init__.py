"""Horovod on Spark (docs/guide_spark.md)."""

from multiring.horovod.spark_running import run, run_elastic

__all__ = ["run", "run_elastic"]
