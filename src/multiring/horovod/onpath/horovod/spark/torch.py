"""Train torch models on DataFrames (docs/guide_spark.md)."""

from multiring.spark.torch_estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
