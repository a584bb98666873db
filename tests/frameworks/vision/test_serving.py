"""`multiring vision serve`, as clients meet it."""

import gzip
import http.client
import json
import os
import re
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_servers import ClientLoad, RunningServer, running_server
from tests.support.vision_models import draw_pictures
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from multiring._cli import main
from multiring.vision.models.vision_model import load_model

INFER, PICTURE = "/v2/models/first/infer", "/v2/models/first/picture"


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[RunningServer]:
    """Return a server of the exported model."""
    with running_server(exported / "model.onnx", "--body-bytes", "4000000", "--pixels", "1000000") as started:
        yield started
        # Malformed requests add no line: a pipe that nobody reads would hold up the server once it is full.
        assert re.fullmatch(r"\d+ requests, \d+ answered\n", started.end())


def tensor(pixels: Any, **changes: Any) -> dict[str, Any]:
    """Return an input for JSON."""
    array = np.asarray(pixels)
    told = {"name": "pixels", "shape": list(array.shape), "datatype": "UINT8", "data": array.reshape(-1).tolist()}
    return {**told, **changes}


def test_tritons_client_is_served(server: RunningServer, exported: Path) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("first")
    assert client.is_model_ready("first", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "multiring"
    # Of that extension, only the index is there; a client must not count on loading models.
    assert "model_repository" not in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("first")["inputs"] == [
        {"name": "pixels", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}
    ]
    assert client.get_model_repository_index() == [{"name": "first", "version": "1", "state": "READY", "reason": ""}]
    pixels = np.random.default_rng(0).integers(0, 256, (3, 21, 34, 3), np.uint8)
    with torch.no_grad():
        expected = load_model(exported)(torch.from_numpy(pixels))["probabilities"].numpy()
    for is_binary in (True, False):
        asked = triton.InferInput("pixels", pixels.shape, "UINT8")
        asked.set_data_from_numpy(pixels, binary_data=is_binary)
        for packed, wants_bytes in ((None, True), ("gzip", False), ("deflate", True)):
            wanted = [triton.InferRequestedOutput("probabilities", binary_data=wants_bytes)]
            found = client.infer("first", [asked], "1", wanted, request_id="a 7", request_compression_algorithm=packed)
            np.testing.assert_allclose(found.as_numpy("probabilities"), expected, atol=1e-6)
            assert found.get_response()["id"] == "a 7"
        np.testing.assert_allclose(client.infer("first", [asked]).as_numpy("probabilities"), expected, atol=1e-6)
    later = client.async_infer("first", [asked])
    np.testing.assert_allclose(later.get_result().as_numpy("probabilities"), expected, atol=1e-6)
    with pytest.raises(InferenceServerException, match="there is no model 'other': want one of first"):
        client.infer("other", [asked])
    client.close()


def form(*files: tuple[str, bytes], boundary: str = "b") -> bytes:
    """Return a form with files."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="picture"; filename="{name}"\r\n\r\n'.encode() + data
        for name, data in files
    ]
    return b"\r\n".join([*parts, f"--{boundary}--\r\n".encode()])


def test_a_form_of_pictures_is_answered_in_its_order(server: RunningServer, tmp_path: Path) -> None:
    paths = draw_pictures(tmp_path, 5)
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    body = form(*((each.name, each.read_bytes()) for each in paths))
    status, _, found = server.ask("POST", PICTURE, body, headers)
    assert status == 200
    answers = json.loads(found)["answers"]
    assert [each["picture"] for each in answers] == [each.name for each in paths]
    alone = [json.loads(server.ask("POST", PICTURE, each.read_bytes())[2])["answers"][0] for each in paths]
    for one, other in zip(answers, alone, strict=True):
        assert one["labels"][0]["class"] == other["labels"][0]["class"]
        assert one["labels"][0]["score"] == pytest.approx(other["labels"][0]["score"], abs=1e-6)
    status, _, found = server.ask("POST", PICTURE, form(*[("a.png", paths[0].read_bytes())] * 17), headers)
    assert status == 400
    assert b"Too many files" in found


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG file that claims a size and has any data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


ROW = [[[1, 2, 3]]]
JSON = {"Content-Type": "application/json"}
# Bodies of the infer endpoint that are wrong: the inputs, and a part of the answer.
WRONG_INPUTS: list[tuple[Any, str]] = [
    ([tensor([ROW], shape=[-1, 1, 1, 3])], "want sizes above 0"),
    ([tensor([ROW], shape=[1, 1, 1, 3.0])], "want a list of whole numbers"),
    ([tensor([ROW], shape=[True, 1, 1, 3])], "want a list of whole numbers"),
    ([tensor([ROW], shape=[0, 1, 1, 3])], "want sizes above 0"),
    ([tensor([ROW], shape=[1, 1, 3])], "want [-1, -1, -1, 3]"),
    ([tensor([ROW], shape=[1, 1, 1, 4])], "want [-1, -1, -1, 3]"),
    ([tensor([ROW], shape=[2, 1, 1, 3])], "has 3 values: want 6"),
    ([tensor([ROW], shape=[10**30, 1, 1, 3])], "want sizes above 0"),
    ([tensor([ROW], shape=[17, 1, 1, 3])], "has 17 rows: want at most 16"),
    ([tensor([ROW], shape=[1, 1, 20000, 3])], "want at most 16384"),
    ([tensor([ROW], shape=[1, 2000, 2000, 3])], "has 12000000 values: want at most 3000000"),
    ([tensor([ROW], datatype="FP32")], "has the datatype 'FP32': want UINT8"),
    ([tensor([ROW], datatype=None)], "want UINT8"),
    ([tensor([ROW], data=[1, 2, 256])], "outside UINT8"),
    ([tensor([ROW], data=[1, 2, -1])], "outside UINT8"),
    ([tensor([ROW], data=[1, 2, 10**40])], "outside UINT8"),
    ([tensor([ROW], data=[1, 2, 2.5])], "has the value '2.5': want UINT8"),
    ([tensor([ROW], data=[1, 2, True])], "has the value 'True': want UINT8"),
    ([tensor([ROW], data=[1, 2, None])], "has the value 'None'"),
    ([tensor([ROW], data=[1, [2], 3])], "has the value '[2]'"),
    ([tensor([ROW], data=[[1, 2], 3])], "want lists of numbers of one depth"),
    ([tensor([ROW], data="abc")], "has no data"),
    ([tensor([ROW], data=[])], "has 0 values"),
    ([tensor([ROW], name="x")], "input 'x': the model has only pixels"),
    ([tensor([ROW], name=["pixels"])], "the model has only pixels"),
    ([tensor([ROW]), tensor([ROW])], "is given twice"),
    ([tensor([ROW], parameters={"binary_data_size": 3})], "has both data and binary_data_size"),
    ([tensor([ROW], parameters=[])], "want an object"),
    ([], "inputs: want a list of at least one object"),
    ({"name": "pixels"}, "inputs: want a list"),
    (None, "inputs: want a list"),
]
WRONG_JSON: list[tuple[bytes, str]] = [
    (b"", "is no JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (b"\xff\xfe\x00", "is no JSON"),
    (b"[]", "is a JSON list: want an object"),
    (b"3", "is a JSON int"),
    (
        b'{"inputs": [{"name": "pixels", "shape": [1, 1, 1, 3], "datatype": "UINT8", "data": [NaN, 1, 2]}]}',
        "NaN is no JSON",
    ),
    (
        b'{"inputs": [{"name": "pixels", "shape": [1, 1, 1, 3], "datatype": "UINT8", "data": [1e999, 1, 2]}]}',
        "want UINT8",
    ),
    (b'{"inputs": ' + b"9" * 5000 + b"}", "is no JSON"),
    (json.dumps({"inputs": [tensor([ROW])], "id": 3}).encode(), "id: want a text"),
    (json.dumps({"inputs": [tensor([ROW])], "parameters": {"binary_data_output": 1}}).encode(), "want true or false"),
    (json.dumps({"inputs": [tensor([ROW])], "outputs": [{"name": "y"}]}).encode(), "output 'y': the model has only"),
    (json.dumps({"inputs": [tensor([ROW])], "outputs": [3]}).encode(), "outputs: want a list"),
    (
        json.dumps(
            {"inputs": [tensor([ROW])], "outputs": [{"name": "probabilities", "parameters": {"classification": 1}}]}
        ).encode(),
        "classification is not supported",
    ),
    (
        json.dumps(
            {"inputs": [tensor([ROW], data=None, parameters={"shared_memory_region": "r", "binary_data_size": 3})]}
        ).encode(),
        "input 'pixels': the parameter shared_memory_region is not supported; leave it out",
    ),
    (
        json.dumps(
            {
                "inputs": [tensor([ROW])],
                "outputs": [{"name": "probabilities", "parameters": {"shared_memory_region": "r"}}],
            }
        ).encode(),
        "output 'probabilities': the parameter shared_memory_region is not supported",
    ),
    (
        json.dumps({"inputs": [tensor([ROW])], "parameters": {"sequence_id": 7}}).encode(),
        "sequence_id is not supported",
    ),
    (
        json.dumps({"inputs": [tensor([ROW])], "outputs": [{"name": "probabilities"}] * 2}).encode(),
        "output 'probabilities' is asked for twice",
    ),
    (b'{"inputs": [' + json.dumps(tensor([ROW])).encode() + b'], "id": "\\ud800"}', "id: want a text of at most 1000"),
]


def test_wrong_tensors_get_a_sentence(server: RunningServer) -> None:
    cases = [(json.dumps({"inputs": inputs}).encode(), text) for inputs, text in WRONG_INPUTS] + WRONG_JSON
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)
    for body, text in cases:
        connection.request("POST", INFER, body, JSON)  # one connection: a refusal keeps it in order
        response = connection.getresponse()
        told = json.loads(response.read())
        assert response.status in {400, 413}, told
        assert text in told["error"], (body[:200], told)
    connection.close()


def test_wrong_bytes_after_the_json_get_a_sentence(server: RunningServer) -> None:
    def asked(size: Any, shape: list[int], tail: bytes, length: Any = None) -> tuple[int, bytes]:
        one = {"name": "pixels", "shape": shape, "datatype": "UINT8", "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [one]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head) if length is None else length)}
        status, _, body = server.ask("POST", INFER, head + tail, headers)
        return status, body

    assert asked(6, [1, 1, 2, 3], bytes(6))[0] == 200
    for arguments, text in (
        ((6, [1, 1, 2, 3], bytes(5)), b"needs 6 bytes after the JSON, and 5 are left"),
        ((6, [1, 1, 2, 3], bytes(7)), b"7 bytes follow the JSON, and the inputs name 6"),
        ((5, [1, 1, 2, 3], bytes(5)), b"binary_data_size is 5, and its shape and type have 6"),
        ((-6, [1, 1, 2, 3], bytes(6)), b"binary_data_size is -6"),
        (("6", [1, 1, 2, 3], bytes(6)), b"and its shape and type have 6"),
        ((6, [1, 1, 2, 3], bytes(6), 10**9), b"Inference-Header-Content-Length 1000000000: want 1 to"),
        ((6, [1, 1, 2, 3], bytes(6), -3), b"want a number of bytes"),
        ((6, [1, 1, 2, 3], bytes(6), "x"), b"want a number of bytes"),
        ((6, [1, 1, 2, 3], bytes(6), 0), b"want 1 to"),
        ((6, [1, 1, 2, 3], bytes(6), 7), b"is no JSON"),
    ):
        status, body = asked(*arguments)
        assert status == 400
        assert text in body, body


def test_hostile_pictures_and_packings_get_a_sentence(server: RunningServer, tmp_path: Path) -> None:
    [path] = draw_pictures(tmp_path, 1)
    good, start = path.read_bytes(), server.resident_bytes()
    wide = zlib.compress(b"\0" * (1 + 3 * 20000))
    bomb = gzip.compress(bytes(300_000_000))
    assert len(bomb) < 400_000
    multipart = {"Content-Type": "multipart/form-data; boundary=b"}
    cases: list[tuple[bytes, dict[str, str], int, str]] = [
        (b"", {}, 400, "is empty"),
        (b"no picture", {}, 400, "is no picture that multiring reads"),
        (good[:100], {}, 400, "cannot be decoded"),
        (png(60000, 60000), {}, 413, "claims too many pixels"),
        (png(2000, 2000), {}, 413, "claims 2000 x 2000 pixels: want 1 to 1000000"),
        (png(20000, 1, wide), {}, 413, "want sides of at most 16384"),
        (png(0, 5), {}, 400, ""),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", {}, 400, "is no picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", {}, 400, "is no picture"),
        (bytes(4_000_001), {}, 413, "a body of 4000001 bytes: want at most 4000000"),
        (bomb, {"Content-Encoding": "gzip"}, 413, "has more than 4000000 bytes once it is unpacked"),
        (gzip.compress(good)[:-30], {"Content-Encoding": "gzip"}, 400, "is truncated"),
        (good, {"Content-Encoding": "gzip"}, 400, "is no gzip"),
        (good, {"Content-Encoding": "br"}, 415, "want gzip, deflate or none"),
        (good, {"Content-Type": "multipart/form-data"}, 400, "Missing boundary"),
        (form(("a", good))[:-20], multipart, 400, ""),
        (b"--b\r\n\r\n\r\n--b--", multipart, 400, "is malformed"),
        (b"--b--", multipart, 400, ""),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n3\r\n--b--\r\n', multipart, 400, "has no file"),
        (form(("a", b"x")), multipart, 400, "picture 'a' is no picture"),
        (form(("a", good), ("b", png(20000, 1, wide))), multipart, 413, "picture 'b': a picture of 20000 x 1 pixels"),
    ]
    for body, headers, status, text in cases:
        found, _, answer = server.ask("POST", PICTURE, body, headers)
        assert found == status, (body[:60], answer)
        assert text in json.loads(answer)["error"], answer
    for path_of, status in (
        (f"{PICTURE}/x", 404),
        ("/v2/models/first/versions/2/picture", 404),
        ("/../etc/passwd", 404),
    ):
        assert server.ask("POST", path_of, good)[0] == status
    assert server.ask("DELETE", PICTURE)[0] == 405
    for raw, status in (
        (b"\0\1\2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\nConnection: close\r\n\r\n", 200),
        (b"GET " + b"a" * 10**5, 400),
    ):
        assert server.send(raw).startswith(b"HTTP/1.1 %d " % status), raw[:60]
    assert server.ask("POST", PICTURE, good)[0] == 200
    assert server.resident_bytes() - start < 150_000_000


def test_only_loopback_names_are_served_without_tokens(server: RunningServer) -> None:
    assert server.ask("GET", "/v2", headers={"Host": "localhost:1"})[0] == 200
    status, _, body = server.ask("GET", "/v2", headers={"Host": "evil.example"})
    assert status == 403
    assert b"want localhost" in body
    for malformed in ("evil.example:x", "evil.example:999999", "localhost@evil.example", "[", "localhost/", ""):
        status, _, body = server.ask("GET", "/v2", headers={"Host": malformed})
        assert status == 400, malformed
        assert b"want NAME or NAME:PORT" in body
    for name in ("LOCALHOST", "127.0.0.9:", "[::1]:80"):
        assert server.ask("GET", "/v2", headers={"Host": name})[0] == 200, name


def test_the_page_the_metrics_and_openapi(server: RunningServer) -> None:
    status, headers, body = server.ask("GET", "/")
    assert status == 200
    assert b"page.js" in body
    assert "default-src 'self'" in headers["content-security-policy"]
    assert server.ask("GET", "/page.js")[1]["content-type"].startswith("text/javascript")
    assert server.ask("GET", "/page.css")[0] == 200
    _, headers, body = server.ask("GET", "/metrics")
    text = body.decode()
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    counted = re.search(r'multiring_requests_total\{endpoint="page",model="",status="200"\} (\d+)', text)
    assert counted is not None
    assert int(counted[1]) >= 3
    paths = json.loads(server.ask("GET", "/openapi.json")[2])["paths"]
    for path, operations in paths.items():
        place = path.replace("{model}", "first").replace("{version}", "1")
        for method in set(operations) - {"parameters"}:
            assert server.ask(method.upper(), place)[0] not in {404, 405}, path


def test_tokens(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# of ann\n0123456789abcdef0123\n\nanother-token-of-bob\n")
    model = str(exported / "model.onnx")
    tokens.chmod(0o644)
    assert main(["vision", "serve", model, "--tokens", str(tokens)]) == 2
    assert "other users may read the tokens" in capsys.readouterr().err
    tokens.chmod(0o600)
    with running_server(f"m:3={model}", f"m:10={model}", "--tokens", tokens, "--host", "127.0.0.1") as server:
        for path in ("/v2/health/live", "/v2/health/ready", "/", "/openapi.json"):
            assert server.ask("GET", path, headers={"Host": "other.example"})[0] == 200
        for header in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic 0123456789abcdef0123"}):
            for path in ("/v2", "/metrics", "/v2/models/m"):
                status, headers, _ = server.ask("GET", path, headers=header)
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
        ours = {"Authorization": "Bearer another-token-of-bob"}
        told = json.loads(server.ask("GET", "/v2/models/m", headers=ours)[2])
        assert (told["versions"], told["parameters"]["version"]) == (["3", "10"], "10")
        told = json.loads(server.ask("GET", "/v2/models/m/versions/3", headers=ours)[2])
        assert told["parameters"]["version"] == "3"
    tokens.write_text("short\n")
    assert main(["vision", "serve", model, "--tokens", str(tokens)]) == 2
    assert "has fewer than 16 characters" in capsys.readouterr().err


def test_what_cannot_be_served_is_told(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(exported / "model.onnx")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, text in (
            ([model, "--port", port], f"port {port} of '127.0.0.1' cannot be used: Address already in use"),
            ([model, "--host", "192.0.2.1"], "lets other hosts connect: give --tokens FILE"),
            ([model, "--port", "70000"], "--port 70000: want a whole number, 0 to 65535"),
            ([model, "--batch", "0"], "--batch 0: want a whole number, 1 to"),
            ([model, "--time", "nan"], "--time nan: want a number of seconds above 0"),
            ([model, model], "has the version 1 twice"),
            ([f"a b={model}"], "want a name of letters"),
            ([f"a:0={model}"], "version '0': want a whole number above 0"),
            ([str(tmp_path)], "has no NAME/VERSION/model.onnx"),
            ([str(tmp_path / "none.onnx")], "cannot be read"),
        ):
            assert main(["vision", "serve", *words]) == 2
            assert text in capsys.readouterr().err


def test_sigterm_loses_no_request(exported: Path, tmp_path: Path) -> None:
    [path] = draw_pictures(tmp_path, 1)
    repository = tmp_path / "models" / "m" / "7"
    repository.mkdir(parents=True)
    for name in ("model.onnx", "model.onnx.json"):
        os.link(exported / name, repository / name)
    with running_server(tmp_path / "models") as server:
        load = ClientLoad(server.port, "/v2/models/m/picture", path.read_bytes(), clients=8)
        deadline = time.monotonic() + 240
        while len(load.seconds) < 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        rest = server.end()
        load.join()
    assert not load.lost
    assert len(load.seconds) >= 100
    assert load.statuses == {200}
    counts = [int(word) for word in rest.replace(",", "").split() if word.isdigit()]
    assert counts[0] == counts[1] == len(load.seconds)
