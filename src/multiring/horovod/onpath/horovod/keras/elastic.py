"""Training with `fit` that continues after a failure."""

from multiring.keras.elastic import CommitStateCallback as CommitStateCallback
from multiring.keras.elastic import KerasState as KerasState
from multiring.keras.elastic import UpdateBatchStateCallback as UpdateBatchStateCallback
from multiring.keras.elastic import UpdateEpochStateCallback as UpdateEpochStateCallback
from multiring.keras.elastic import run as run
