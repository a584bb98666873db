"""The rank that a task of a barrier stage keeps. This code runs in Spark's Python worker."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict

from multiring._launch.cluster_ranks import ClusterRendezvous, WorkerFacts, positions_of, rank_order
from multiring._launch.cluster_worker import ReservedPlace, draw_secret, facts_here
from multiring._launch.first_failure import Ended, end_in
from multiring._launch.pickled_call import Returned
from multiring._launch.rank_keeper import RankKeeper
from multiring.errors import LaunchError, MultiringError
from multiring.spark.job import BEGIN, END

_CAUSE_S = 30.0  # how long the task of a consequence lets the task with the cause fail first


def keep_rank(call: bytes, variables: Mapping[str, str], job: str, *, horovod: bool) -> tuple[int, bytes]:
    """Meet the other tasks of the stage, run this task's rank, and return its number and its pickled outcome.

    The task of partition 0 draws the secret. The tasks exchange messages through Spark's driver, which keeps them in
    memory. A secret in the task's closure could be written to a file by Spark.

    Raises:
        LaunchError: the rank failed. Spark then ends the other tasks.
    """
    from pyspark import BarrierTaskContext  # noqa: PLC0415 -- Spark's Python worker has it

    context = BarrierTaskContext.get()
    index = context.partitionId()
    with ExitStack() as stack:  # an executor lives on after a failed task, and must not keep the ports
        try:
            facts = [
                WorkerFacts(**each)
                for each in map(json.loads, context.allGather(json.dumps(asdict(facts_here(f"task {index}")))))
            ]
            message = ""
            if index == 0:
                reserved = ReservedPlace(variables, is_one_host=len({each.host for each in facts}) == 1)
                stack.callback(reserved.release)
                message = json.dumps({**reserved.told, "secret": draw_secret(), "job": job})
            place = ClusterRendezvous(**json.loads(context.allGather(message)[0]))
        except MultiringError as error:
            raise LaunchError(f"{BEGIN}the ranks could not be started: {error}{END}") from None
        order = rank_order([each.host for each in facts])
        rank = order.index(index)
        position = positions_of([facts[each] for each in order])[rank]
        data = RankKeeper(call, position, place, variables, horovod=horovod).run()
    end = end_in(data)
    if isinstance(end, Returned):
        return rank, data
    if isinstance(end, Ended):
        raise LaunchError(f"{BEGIN}rank {rank} {end.text}{END}")
    if end.is_consequence:
        time.sleep(_CAUSE_S)  # Spark reports the first task that fails, and then ends this one
    raise LaunchError(f"{BEGIN}rank {rank} raised\n{end.text}{END}")
