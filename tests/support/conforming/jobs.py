"""Jobs that ranks run to test whether an adapter conforms.

Each module `on_*` beside this one defines an ADAPTER.
"""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.nursery import Here

from multiring.adapters import conformance

PACKAGE = "tests.support.conforming"


def adapter_of(module: str) -> conformance.Adapter:
    found: conformance.Adapter = importlib.import_module(module).ADAPTER
    return found


def suite(_here: Here, module: str) -> tuple[str, str, list[tuple[str, str, str]]]:
    adapter = adapter_of(module)
    results = [(each.check, each.outcome.value, each.text) for each in conformance.run(adapter)]
    return adapter.name, adapter.version, results


def lose_a_rank(here: Here, module: str, fails: int | None) -> float:
    return conformance.lose_a_rank(adapter_of(module), lambda: here.reach("at work"), fails=fails)


def be_interrupted(here: Here, module: str, over: str) -> float:
    try:
        taken_s = conformance.be_interrupted(adapter_of(module))
    finally:
        if here.rank == 0:
            Path(over).touch()
    while not Path(over).exists():
        time.sleep(0.05)
    return taken_s


def digits(here: Here, module: str, example: str, steps: int | None) -> tuple[list[float], float]:
    """Train examples/digits in one framework; return the losses and test accuracy."""
    losses, accuracy, _ = timed_digits(here, module, example, steps)
    return losses, accuracy


def timed_digits(_here: Here, module: str, example: str, steps: int | None) -> tuple[list[float], float, float]:
    """Train like `digits`; return the steps per second, too.

    The rate leaves out the first quarter of the steps, because functions are compiled in it.
    """
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "digits"))
    task = importlib.import_module("digits_task")
    adapter_of(module).init()
    model = importlib.import_module(example).Model(task.weights())
    plain, ends = model.step, [0.0]

    def step(images: Any, labels: Any) -> Any:
        loss = plain(images, labels)
        ends.append(time.perf_counter())
        return loss

    model.step = step
    losses = task.train(model, steps=steps)
    first = max(1, len(ends) // 4)
    rate = (len(ends) - 1 - first) / max(ends[-1] - ends[first], 1e-9)
    return losses, task.accuracy(model), rate


def elsewhere(here: Here, module: str, function: str) -> Any:
    """Call a function of a module that only the rank's interpreter can import."""
    return getattr(importlib.import_module(module), function)(here)
