"""A worker whose every library shares nothing, and says it does."""

import contextlib
from collections.abc import Iterator

from multiring.bench.workers import step_worker
from multiring.bench.workers.step_case import Meeting


@contextlib.contextmanager
def apart(task: step_worker.Task, _meeting: Meeting) -> Iterator[step_worker.Training]:
    yield step_worker.Training(task.model, task.optimizer(), "", {})


step_worker.LIBRARIES["multiring"] = apart
step_worker.main()
