"""Callbacks for `fit`."""

from typing import Any

from multiring.keras import callbacks
from multiring.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """`multiring.keras.callbacks.BestModelCheckpoint` with Horovod's parameters only."""

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: Any = "epoch"
    ) -> None:
        super().__init__(monitor, verbose, mode=mode, save_freq=save_freq)
