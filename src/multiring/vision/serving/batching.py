"""`DynamicBatcher`: requests that wait at the same time go through the model together."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import DataError
from multiring.vision.serving.refusals import BAD_REQUEST, FAILED, RequestError

Arrays = dict[str, NDArray[Any]]
_SLOW = 0.9  # the weight of the past in the average time of a request
_MOST_RETRY_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """When a batch is run.

    Attributes:
        rows: the most rows of a batch.
        values: the most values of all inputs of a batch. A request that has more runs alone.
        delay_s: how long a request waits for others while the model is idle. While it runs, requests wait anyway, so
            0 makes batches under load and adds no delay.
    """

    rows: int
    values: int
    delay_s: float


@dataclass(kw_only=True, slots=True, eq=False)
class _Waiting:
    inputs: Arrays
    rows: int
    values: int
    answer: "asyncio.Future[Arrays]"
    since: float = field(default_factory=time.monotonic)


class DynamicBatcher:
    """Runs the requests of one model, one batch at a time, in the order of the oldest request of each shape.

    It belongs to one event loop. Inputs of one batch have the same names, types and sizes but the first.
    """

    def __init__(
        self,
        run: Callable[[Arrays], Arrays],
        limits: BatchLimits,
        executor: Executor,
        told: Callable[[int, float], None] = lambda *_: None,
    ) -> None:
        """Make a batcher.

        Args:
            run: computes a batch. It may raise a DataError.
            limits: when a batch is run. Rows of 1: requests run alone.
            executor: has the thread that computes.
            told: is called with the rows and the seconds of each batch.
        """
        self._run = run
        self._limits = limits
        self._executor = executor
        self._told = told
        self._waiting: dict[tuple[object, ...], list[_Waiting]] = {}
        self._news = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._request_s = 0.0

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a batch."""
        return sum(map(len, self._waiting.values()))

    def retry_after_s(self) -> int:
        """Return after how many seconds the requests that wait now are probably answered; 1 to 60."""
        return max(1, min(_MOST_RETRY_S, math.ceil(self.waiting * self._request_s)))

    async def infer(self, inputs: Arrays) -> Arrays:
        """Return the outputs for a request. If the caller is cancelled while the request waits, it is not computed.

        Raises:
            RequestError: the model refuses the inputs.
        """
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())
        rows = max((len(each) for each in inputs.values() if each.ndim), default=1)
        waiting = _Waiting(
            inputs=inputs,
            rows=rows,
            values=sum(each.size for each in inputs.values()),
            answer=asyncio.get_running_loop().create_future(),
        )
        key = tuple((name, each.shape[1:], each.dtype.str) for name, each in sorted(inputs.items()))
        self._waiting.setdefault(key, []).append(waiting)
        self._news.set()
        return await waiting.answer

    async def close(self) -> None:
        """End the worker. No request may wait any more."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            self._news.clear()
            self._forget_cancelled()
            if not self._waiting:
                await self._news.wait()
                continue
            key = min(self._waiting, key=lambda each: self._waiting[each][0].since)
            queue = self._waiting[key]
            left_s = queue[0].since + self._limits.delay_s - time.monotonic()
            if left_s > 0 and sum(each.rows for each in queue) < self._limits.rows:
                await self._wait_for_news(left_s)
                continue
            batch = self._taken(queue)
            if not queue:
                del self._waiting[key]
            await self._answer(batch)

    async def _wait_for_news(self, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)

    def _forget_cancelled(self) -> None:
        for key, queue in list(self._waiting.items()):
            queue[:] = [each for each in queue if not each.answer.done()]
            if not queue:
                del self._waiting[key]

    def _taken(self, queue: list[_Waiting]) -> list[_Waiting]:
        """Remove the requests of the next batch from a queue."""
        batch = [queue.pop(0)]
        rows, values = batch[0].rows, batch[0].values
        while queue and rows + queue[0].rows <= self._limits.rows and values + queue[0].values <= self._limits.values:
            batch.append(queue.pop(0))
            rows, values = rows + batch[-1].rows, values + batch[-1].values
        return batch

    async def _answer(self, batch: Sequence[_Waiting]) -> None:
        start = time.monotonic()
        found: list[Arrays] | Exception
        try:
            call = asyncio.get_running_loop().run_in_executor(self._executor, self._computed, batch)
            found = await call
        except (DataError, RequestError) as error:
            if len(batch) > 1:  # one request's inputs must not fail the others
                for each in batch:
                    await self._answer([each])
                return
            found = RequestError(BAD_REQUEST, str(error)) if isinstance(error, DataError) else error
        except Exception as error:  # noqa: BLE001 -- the request gets it
            found = RequestError(FAILED, f"the model failed: {type(error).__name__}: {error}")
        seconds = time.monotonic() - start
        self._request_s = _SLOW * self._request_s + (1 - _SLOW) * seconds / len(batch)
        self._told(sum(each.rows for each in batch), seconds)
        for number, each in enumerate(batch):
            if each.answer.done():
                continue
            if isinstance(found, Exception):
                each.answer.set_exception(found)
            else:
                each.answer.set_result(found[number])

    def _computed(self, batch: Sequence[_Waiting]) -> list[Arrays]:
        if len(batch) == 1:
            return [self._run(batch[0].inputs)]
        together = {name: np.concatenate([each.inputs[name] for each in batch]) for name in batch[0].inputs}
        outputs = self._run(together)
        ends = np.cumsum([each.rows for each in batch])
        if any(not each.ndim or len(each) != ends[-1] for each in outputs.values()):
            raise DataError("the model's outputs do not have a row for each row of the inputs")
        return [
            {name: each[end - one.rows : end] for name, each in outputs.items()}
            for end, one in zip(ends, batch, strict=True)
        ]
