"""A worker whose libraries claim to share gradients but do not."""

import contextlib
from collections.abc import Iterator

from multiring._bench.workers import step_worker
from multiring._bench.workers.step_case import FileRendezvous
from multiring._bench.workers.step_task import StepTask


@contextlib.contextmanager
def apart(task: StepTask, _rendezvous: FileRendezvous) -> Iterator[step_worker.Training]:
    yield step_worker.Training(task.model, task.optimizer(), "", {})


step_worker.LIBRARIES["multiring"] = apart
step_worker.main()
