"""Callbacks for `fit`."""

from multiring.keras.callbacks import BestModelCheckpoint as BestModelCheckpoint
from multiring.keras.callbacks import BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback
from multiring.keras.callbacks import LearningRateScheduleCallback as LearningRateScheduleCallback
from multiring.keras.callbacks import LearningRateWarmupCallback as LearningRateWarmupCallback
from multiring.keras.callbacks import MetricAverageCallback as MetricAverageCallback
