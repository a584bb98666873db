"""Parts of the server that need no network: batching, limits, time, and metrics."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from multiring.errors import ArgumentError, DataError
from multiring.vision.exporting.exported_files import ModelTensor
from multiring.vision.serving.application import InferenceServer
from multiring.vision.serving.batching import Arrays, BatchLimits, DynamicBatcher
from multiring.vision.serving.limits import Admission, ServerLimits
from multiring.vision.serving.metrics import ServerMetrics
from multiring.vision.serving.refusals import RequestError
from multiring.vision.serving.repository import ModelRepository, ServedModel
from multiring.vision.serving.tensors import TensorLimits, read_request, write_response


class Doubling:
    """A model that doubles x, of float32 (n, 2), and remembers its batches."""

    def __init__(self, seconds: float = 0.0, goes_on: threading.Event | None = None) -> None:
        tensors = tuple(ModelTensor(name=name, dtype="float32", shape=(None, 2)) for name in "xy")
        self.model = SimpleNamespace(
            kind="module", inputs=tensors[:1], outputs=tensors[1:], classes=(), digest="", made="", description={}
        )
        self.seconds = seconds
        self.has_begun, self.goes_on = threading.Event(), goes_on
        self.rows: list[int] = []

    def run(self, inputs: Arrays) -> Arrays:
        """Return y = 2 x. A negative x is refused, and NaN is a fault."""
        self.has_begun.set()
        time.sleep(self.seconds)
        assert self.goes_on is None or self.goes_on.wait(100)
        self.rows.append(len(inputs["x"]))
        if (inputs["x"] < 0).any():
            raise DataError("negative")
        if (inputs["x"] == 99).any():
            raise ZeroDivisionError("99")
        return {"y": 2 * inputs["x"]}


def rows(*values: float) -> Arrays:
    """Return an input whose rows have equal values."""
    return {"x": np.repeat(np.array(values, np.float32)[:, None], 2, axis=1)}


def batched(model: Doubling, work: Callable[[DynamicBatcher], Awaitable[Any]], delay_s: float = 0.0) -> Any:
    """Run work with a batcher of at most 4 rows."""

    async def run() -> Any:
        with ThreadPoolExecutor(1) as executor:
            batcher = DynamicBatcher(model.run, BatchLimits(rows=4, values=100, delay_s=delay_s), executor)
            try:
                return await work(batcher)
            finally:
                await batcher.close()

    return asyncio.run(run())


def test_requests_that_wait_go_together_and_get_their_own_rows() -> None:
    model = Doubling(0.02)

    async def work(batcher: DynamicBatcher) -> list[Arrays]:
        return await asyncio.gather(*(batcher.infer(rows(*range(k, k + 1 + k % 2))) for k in range(9)))

    for k, found in enumerate(batched(model, work)):
        np.testing.assert_array_equal(found["y"], 2 * rows(*range(k, k + 1 + k % 2))["x"])
    assert sum(model.rows) == 9 + 4
    assert max(model.rows) == 4
    assert len(model.rows) <= 6


def test_an_idle_model_waits_for_the_delay_only() -> None:
    model = Doubling()

    async def work(batcher: DynamicBatcher) -> float:
        start = time.monotonic()
        later = asyncio.create_task(batcher.infer(rows(1)))
        await asyncio.sleep(0.02)  # a part of the delay, which a busy machine does not stretch beyond it
        await asyncio.gather(later, batcher.infer(rows(2)))
        return time.monotonic() - start

    assert 0.9 < batched(model, work, delay_s=1.0) < 60
    assert model.rows == [2]


def test_one_bad_request_does_not_fail_the_others() -> None:
    model = Doubling(0.02)

    async def work(batcher: DynamicBatcher) -> list[Any]:
        first = asyncio.create_task(batcher.infer(rows(0)))
        await asyncio.sleep(0.005)  # the others wait meanwhile, and go together
        found = await asyncio.gather(*(batcher.infer(rows(k)) for k in (1, -1, 3)), return_exceptions=True)
        await first
        broken = await asyncio.gather(batcher.infer(rows(99)), return_exceptions=True)
        return [*found, *broken, await batcher.infer(rows(5))]

    one, bad, three, broken, five = batched(model, work)
    assert [each["y"][0, 0] for each in (one, three, five)] == [2, 6, 10]
    assert isinstance(bad, RequestError)
    assert (bad.status, str(bad)) == (400, "negative")
    assert (broken.status, str(broken)) == (500, "the model failed: ZeroDivisionError: 99")


def test_cancelled_requests_are_not_computed_and_large_ones_run_alone() -> None:
    goes_on = threading.Event()
    model = Doubling(goes_on=goes_on)

    async def work(batcher: DynamicBatcher) -> Arrays:
        first = asyncio.create_task(batcher.infer(rows(0)))
        assert await asyncio.to_thread(model.has_begun.wait, 100)
        dropped = [asyncio.create_task(batcher.infer(rows(k))) for k in range(3)]
        large = asyncio.create_task(batcher.infer(rows(*range(6))))
        await asyncio.sleep(0)
        assert batcher.waiting == 4
        for each in dropped:
            each.cancel()
        goes_on.set()
        await first
        return await large

    assert len(batched(model, work)["y"]) == 6
    assert model.rows == [1, 6]


def asked(
    model: Doubling, limits: ServerLimits, work: Callable[[httpx.AsyncClient, InferenceServer], Awaitable[Any]]
) -> Any:
    """Run work with a client of a server in this process."""

    async def run() -> Any:
        served = ServedModel(name="m", version="1", session=model, description=None)  # type: ignore[arg-type]
        server = InferenceServer(ModelRepository([served]), limits)
        async with server.app.router.lifespan_context(server.app):
            transport = httpx.ASGITransport(server.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await work(client, server)

    return asyncio.run(run())


def body(*values: float) -> dict[str, Any]:
    """Return a request as JSON."""
    data = rows(*values)["x"]
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(data.shape), "data": data.tolist()}]}


def test_too_many_requests_get_429_and_slow_ones_503() -> None:
    model = Doubling(2.0)

    async def work(client: httpx.AsyncClient, _: InferenceServer) -> list[httpx.Response]:
        return await asyncio.gather(*(client.post("/v2/models/m/infer", json=body(k)) for k in range(5)))

    # The first answer comes 1.8 s before its time is over, for other work, and the second would come after it.
    found = asked(model, ServerLimits(requests=3, batch=1, time_s=3.8), work)
    statuses = sorted(each.status_code for each in found)
    assert statuses == [200, 429, 429, 503, 503]
    for each in found:
        if each.status_code != 200:
            assert 1 <= int(each.headers["retry-after"]) <= 60
    assert len(model.rows) <= 2  # the third was dropped in the queue


def test_memory_is_bounded_and_given_back() -> None:
    async def work(client: httpx.AsyncClient, server: InferenceServer) -> None:
        values = {"datatype": "FP32", "shape": [4, 2], "name": "x", "parameters": {"binary_data_size": 32}}
        head = json.dumps({"inputs": [values]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        for _ in range(3):
            large = await client.post("/v2/models/m/infer", content=bytes(5000))
            assert large.status_code == 429
            assert large.headers["retry-after"] == "1"
            small = await client.post("/v2/models/m/infer", content=head + bytes(32), headers=headers)
            assert small.status_code == 200, small.text
        text = (await client.get("/metrics")).text
        assert "multiring_held_bytes 0\n" in text
        assert "multiring_requests_on_their_way 0\n" in text
        assert server.begun == server.answered == 7

    asked(Doubling(), ServerLimits(memory_bytes=1000), work)
    admission = Admission(ServerLimits(memory_bytes=100))
    with admission.enter(1) as held:
        held.add(90)
        with pytest.raises(RequestError, match="hold all the memory allowed"):
            held.add(11)
    assert (admission.held_bytes, admission.requests) == (0, 0)
    with pytest.raises(RequestError):
        held.add(1)  # a decoder that ends after its request


def test_a_server_that_ends_is_not_ready_and_asks_to_close() -> None:
    async def work(client: httpx.AsyncClient, server: InferenceServer) -> None:
        server.is_draining = True
        for path, status in (("/v2/health/live", 200), ("/v2/health/ready", 503), ("/v2/models/m/ready", 503)):
            found = await client.get(path)
            assert (found.status_code, found.headers["connection"]) == (status, "close")
        found = await client.post("/v2/models/m/infer", json=body(3))
        assert found.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [6, 6]}]

    asked(Doubling(), ServerLimits(), work)


def test_pictures_and_large_json_are_refused_where_they_make_no_sense() -> None:
    async def work(client: httpx.AsyncClient, _: InferenceServer) -> None:
        found = await client.post("/v2/models/m/picture", content=b"x")
        assert (found.status_code, found.json()["error"]) == (
            400,
            "model 'm' takes tensors, and not pictures: use infer",
        )
        found = await client.post("/v2/models/m/infer", content=b" " * 3000)
        assert found.status_code == 413
        assert "3000 bytes of JSON: want at most 2000; send tensors as bytes" in found.text
        found = await client.post("/v2/models/m/infer", json=body(99))
        assert (found.status_code, found.json()["error"]) == (500, "the model failed: ZeroDivisionError: 99")
        found = await client.post("/v2/models/m/infer", json=body(-1))
        assert (found.status_code, found.json()["error"]) == (400, "negative")

    asked(Doubling(), ServerLimits(json_bytes=2000), work)


def test_answers_that_json_does_not_hold() -> None:
    with pytest.raises(RequestError, match="output 'y' has NaN or infinity") as raised:
        write_response({}, {"y": np.array([np.nan])}, {"y": False}, 10)
    assert raised.value.status == 500
    with pytest.raises(RequestError, match="has 11 values: want at most 10 as JSON; ask for bytes"):
        write_response({}, {"y": np.zeros(11)}, {"y": False}, 10)
    data, length = write_response({"id": "1"}, {"y": np.array([np.nan], np.float32)}, {"y": True}, 0)
    assert json.loads(data[:length])["outputs"][0]["parameters"] == {"binary_data_size": 4}
    assert np.isnan(np.frombuffer(data[length:], "<f4")[0])


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64"])
def test_values_of_every_type_come_back(dtype: str) -> None:
    tensor = ModelTensor(name="x", dtype=dtype, shape=(None, 3))
    values = (np.arange(6) % 2 if dtype == "bool" else np.arange(6)).astype(dtype).reshape(2, 3)
    limits = TensorLimits(rows=2, values=6, side=3)
    for is_binary in (True, False):
        text, length = write_response({}, {"x": values}, {"x": is_binary}, 100)
        told = json.loads(text[:length])
        head = json.dumps({"inputs": told["outputs"]}).encode()
        tail = b"" if length is None else text[length:]
        found = read_request(head + tail, len(head) if is_binary else None, (tensor,), (tensor,), limits)
        np.testing.assert_array_equal(found.inputs["x"], values)
        assert found.inputs["x"].dtype == values.dtype
        assert found.outputs == {"x": False}


def test_metrics_are_openmetrics() -> None:
    metrics = ServerMetrics()
    metrics.requests.add(endpoint='a"b\\', status="200")
    metrics.seconds.observe(0.03, endpoint="a")
    metrics.seconds.observe(100, endpoint="a")
    metrics.add_gauge("depth", "Depth.", lambda: 3)
    lines = metrics.text().splitlines()
    assert 'multiring_requests_total{endpoint="a\\"b\\\\",status="200"} 1' in lines
    assert 'multiring_request_seconds_bucket{endpoint="a",le="0.025"} 0' in lines
    assert 'multiring_request_seconds_bucket{endpoint="a",le="0.05"} 1' in lines
    assert 'multiring_request_seconds_bucket{endpoint="a",le="+Inf"} 2' in lines
    assert "multiring_depth 3" in lines
    assert lines[-1] == "# EOF"


def test_limits_that_are_wrong_are_refused() -> None:
    for wrong in ({"batch": 0}, {"delay_s": -1.0}, {"time_s": float("inf")}, {"time_s": float("nan")}):
        with pytest.raises(ArgumentError, match=r"^(batch=0|delay_s=-1\.0|time_s=inf|time_s=nan): want a "):
            ServerLimits(**wrong)
