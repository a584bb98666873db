"""Train Keras models on DataFrames (docs/guide_spark.md)."""

from multiring.spark.keras_estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
