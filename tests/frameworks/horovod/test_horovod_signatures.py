"""The signatures equal those of Horovod 0.28.1, except for those listed here."""

import json
import sys
from pathlib import Path

from tests.support.ranks import Process
from tests.support.scripts import Start, run_script

from multiring._launch.horovod import horovod_environment, positions_on

SCRIPT = Path(__file__).parents[2] / "support" / "horovod_signatures.py"
TABLE = Path(__file__).parents[2] / "support" / "horovod_signatures.json"
LOADED = ("multiring.tensorflow", "multiring.keras")
# Function: the parameters that multiring adds after Horovod's.
ADDED = {
    "horovod.common.elastic.ObjectState.__init__": ["gather_object"],
    "horovod.common.elastic.State.__init__": ["gather_object"],
    "horovod.common.elastic.run_fn": ["failures"],
    "horovod.keras.allgather": ["process_set"],
    "horovod.keras.broadcast": ["process_set"],
    "horovod.keras.reducescatter": ["process_set"],
    "horovod.tensorflow._DistributedAdasumOptimizer.get_slot_names": ["args", "kwargs"],
    "horovod.tensorflow.keras.allreduce": ["process_set"],
    "horovod.tensorflow.keras.callbacks.BestModelCheckpoint.__init__": ["filepath"],
    "horovod.tensorflow.mpi_ops.join": ["device"],
    "horovod.tensorflow.sync_batch_norm.SyncBatchNormalization.__init__": ["process_set"],
    "horovod.torch.functions.allgather_object": ["process_set"],
    "horovod.torch.functions.broadcast_optimizer_state": ["process_set"],
    "horovod.torch.functions.broadcast_parameters": ["process_set"],
    "horovod.torch.optimizer.DistributedOptimizer": ["error_feedback", "bucket_bytes"],
    "horovod.torch.optimizer._DistributedAdasumOptimizer.zero_grad": ["set_to_none"],
    "horovod.torch.optimizer._DistributedOptimizer.zero_grad": ["set_to_none"],
    "horovod.torch.sync_batch_norm.SyncBatchNorm.__init__": ["process_set"],
}
# Horovod's function passes any arguments to another function; multiring's has the other function's parameters.
HANDED_ON = {
    "horovod.tensorflow._DistributedAdasumOptimizer.apply_gradients": "tf.compat.v1.train.Optimizer.apply_gradients",
    "horovod.tensorflow._DistributedAdasumOptimizer.get_slot": "tf.compat.v1.train.Optimizer.get_slot",
    "horovod.tensorflow.mpi_ops.init": "HorovodBasics.init, which is compared",
    "horovod.tensorflow.sync_batch_norm.SyncBatchNormalization.call": "keras.layers.BatchNormalization.call",
    "horovod.torch.mpi_ops.init": "HorovodBasics.init, which is compared",
    "horovod.torch.mpi_ops.shutdown": "HorovodBasics.shutdown, which is compared",
    "horovod.torch.optimizer._DistributedOptimizer.load_state_dict": "torch.optim.Optimizer.load_state_dict",
}
# Names of Horovod that have no use in multiring, and the reasons.
ABSENT = {
    "horovod.common.basics.MPI": "a name for annotations",
    "horovod.common.elastic.notification_manager": "hosts neither join nor leave during a job",
    "horovod.common.process_sets.MPI": "a name for annotations",
    **{
        f"horovod.tensorflow.{name}": "only Horovod's own functions use it"
        for name in (
            *("LocalGradientAggregationHelper", "_allreduce", "_grouped_allreduce", "_grouped_reducescatter"),
            *("_reducescatter", "keras.is_version_greater_equal_than"),
        )
    },
    "horovod.torch.optimizer._DistributedOptimizer.find_duplicates": "only Horovod's constructor uses it",
}


def test_signatures_are_horovods_but_for_listed_additions() -> None:
    (place,) = positions_on([("localhost", 1)])
    start = Start(environments=(horovod_environment({}, place),))
    ((code, told),) = run_script(SCRIPT, 1, "compare", process=Process(nursery="tf", beforehand=LOADED), start=start)
    assert code == 0, told
    found = json.loads(told.splitlines()[-1])
    functions = json.loads(TABLE.read_text())["functions"]
    same = len(functions) - len(set(found["missing"]) & set(functions))
    told = f"{same} of {len(functions)} signatures are Horovod's, {len(found['added'])} of them with parameters added"
    sys.stdout.write(f"{told}\n")
    assert set(found["differs"]) == set(HANDED_ON), found["differs"]
    assert found["added"] == ADDED
    assert set(found["missing"]) == set(ABSENT)
