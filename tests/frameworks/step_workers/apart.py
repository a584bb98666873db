"""A worker whose libraries claim to share gradients but do not."""

import contextlib
from collections.abc import Iterator

from multiring.bench.workers import step_worker
from multiring.bench.workers.step_case import Rendezvous
from multiring.bench.workers.step_task import Task


@contextlib.contextmanager
def apart(task: Task, _rendezvous: Rendezvous) -> Iterator[step_worker.Training]:
    yield step_worker.Training(task.model, task.optimizer(), "", {})


step_worker.LIBRARIES["multiring"] = apart
step_worker.main()
