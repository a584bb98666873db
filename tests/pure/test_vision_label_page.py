"""The page's HTTP interface: labels, edits and corrections, undo, tracks, access, and hostile requests."""

import asyncio
import io
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from multiring._web.guard import MOST_BYTES, Guard, listening_socket
from multiring._web.loopback import is_loopback
from multiring._web.token_files import read_tokens
from multiring.errors import ArgumentError, DataError, StateError
from multiring.vision import Box, Label, Mask, VisionProject, read_picture, run_lengths_of
from multiring.vision.labelling.application import COOKIE, LabellingService, create_application
from multiring.vision.labelling.frames import make_frames, videos_without_frames
from multiring.vision.labelling.proposals import ProposalStore, newest_model
from multiring.vision.labels import to_json
from multiring.vision.project.schema import LabelStoreError

with warnings.catch_warnings():
    # Newer releases of starlette want httpx2 instead of httpx, and work with httpx.
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

TOKEN = "a-token-of-enough-characters"  # noqa: S105 -- of the tests alone
WRITES = {"x-multiring": "label"}
BOX = {"class": "cat", "box": [1.0, 2.0, 3.0, 4.0]}
MOVED = {"class": "cat", "box": [2.0, 2.0, 3.0, 4.0]}


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)).save(path)


def asgi(application: Any) -> Any:
    """Return an ASGI application, whose messages starlette types in another way."""
    return application


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    for number in range(3):
        draw(made / f"{number}.png", number)
    with VisionProject.create(made) as project:
        project.scan()
        project.add_class("cat")
        project.add_class("dog")
    return made


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(asgi(create_application(LabellingService(folder))), base_url="http://localhost", headers=WRITES)


def state(client: TestClient, path: str = "0.png") -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/picture", params={"path": path}).json()
    return found


def edit(client: TestClient, *edits: Any, path: str = "0.png", author: str = "ann", **other: Any) -> Any:
    seen = state(client, path)
    told = {"path": path, "digest": seen["digest"], "after": seen["change"], "author": author, "edits": edits, **other}
    return client.post("/api/edit", json=told)


def test_edits_are_counted_as_corrections(client: TestClient) -> None:
    steps: list[tuple[dict[str, Any], int, Any]] = [
        ({"do": "add", "label": BOX}, 1, [BOX]),
        ({"do": "replace", "index": 0, "label": MOVED}, 1, [MOVED]),
        ({"do": "replace", "index": 0, "label": MOVED}, 0, [MOVED]),
        ({"do": "replace", "index": 0, "label": {**MOVED, "class": "dog"}}, 1, [{**MOVED, "class": "dog"}]),
        ({"do": "reject", "proposal": BOX}, 1, [{**MOVED, "class": "dog"}]),
        ({"do": "delete", "index": 0}, 1, []),
        ({"do": "forget"}, 0, None),
        ({"do": "nothing"}, 0, []),
        ({"do": "set", "labels": [BOX]}, 0, [BOX]),
    ]
    total = 0
    for step, corrections, labels in steps:
        told = edit(client, step).json()
        total += corrections
        assert (told["corrections"], told["labels"], told["counts"]["corrections"]) == (corrections, labels, total)
    assert state(client)["labels"] == [BOX]


@pytest.mark.parametrize(
    "wrong",
    [
        {"do": "add"},
        {"do": "add", "label": {"class": "cow"}},
        {"do": "add", "label": {"class": "cat", "box": [0, 0, -1, 2]}},
        {"do": "add", "label": {"class": "cat", "box": [0, 0, 100, 2]}},
        {"do": "add", "label": {"class": "cat", "box": [0, 0, 1e400, 2]}},
        {"do": "add", "label": {"class": "cat", "mask": {"size": [1 << 40, 1 << 40], "runs": [1]}}},
        {"do": "add", "label": {"class": "cat", "left": 0, "top": 0, "width": 2, "height": 2}},
        {"do": "add", "label": {"class": "cat", "boxes": [0, 0, 1, 2]}},
        {"do": "add", "label": {"class": "cat", "box": [0, 0, 1, 2], "polygon": [[[0, 0], [1, 0], [1, 1]]]}},
        {"do": "add", "label": {"class": "cat", "box": [0, 0, 1, 2], "crowd": True}},
        {"do": "add", "labels": [{"class": "cat"}]},
        {"do": "nothing", "label": {"class": "cat"}},
        {"do": "set"},
        {"do": "delete", "index": 0},
        {"do": "delete", "index": True},
        {"do": "set", "labels": 3},
        {"do": "explode"},
        17,
        None,
    ],
)
def test_wrong_edits_change_nothing(client: TestClient, wrong: Any) -> None:
    seen = state(client)
    told = {"path": "0.png", "digest": seen["digest"], "after": 0, "author": "ann", "edits": [wrong]}
    body = json.dumps(told).replace("Infinity", "1e400")
    answer = client.post("/api/edit", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert state(client)["change"] == 0


def test_a_label_that_is_there_is_not_added_again(client: TestClient) -> None:
    assert edit(client, {"do": "add", "label": BOX}).json()["labels"] == [BOX]
    change = state(client)["change"]
    assert edit(client, {"do": "add", "label": BOX}).json()["labels"] == [BOX]
    assert state(client)["change"] == change  # nothing that an undo would take back
    # Within a request, labels keep their numbers.
    told = edit(client, {"do": "add", "label": BOX}, {"do": "replace", "index": 1, "label": MOVED}).json()
    assert told["labels"] == [BOX, MOVED]


def test_labels_that_cannot_be_written_are_not_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page drops a change that is refused with 400, and tries again after 503."""

    def full(*_: Any, **__: Any) -> Any:
        raise LabelStoreError("the project's labels cannot be written: database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(VisionProject, "set_labels", full)
        answer = edit(client, {"do": "add", "label": BOX})
    assert (answer.status_code, "disk is full" in answer.json()["error"]) == (503, True)


def test_an_outdated_change_is_refused(client: TestClient, folder: Path) -> None:
    seen = state(client)
    assert edit(client, {"do": "add", "label": BOX}, author="ben").status_code == 200
    told = {"path": "0.png", "digest": seen["digest"], "after": 0, "author": "ann", "edits": [{"do": "nothing"}]}
    assert client.post("/api/edit", json=told).status_code == 409
    assert state(client)["labels"] == [BOX]
    draw(folder / "0.png", 90)
    assert client.post("/api/scan", json={}).json()["changed"] == 1
    answer = edit(client, {"do": "nothing"}, digest=seen["digest"])
    assert (answer.status_code, "another file" in answer.json()["error"]) == (409, True)
    assert state(client)["labels"] == [BOX]


def test_undo_takes_back_the_named_change_only(client: TestClient) -> None:
    one = edit(client, {"do": "add", "label": BOX}).json()["change"]
    other = edit(client, {"do": "nothing"}, path="1.png").json()["change"]
    assert client.post("/api/undo", json={"author": "ann", "change": one}).json() == {"paths": ["0.png"]}
    assert (state(client)["labels"], state(client, "1.png")["labels"]) == (None, [])
    edit(client, {"do": "add", "label": BOX}, path="1.png", author="ben")
    assert client.post("/api/undo", json={"author": "ann", "change": other}).status_code == 409
    assert state(client, "1.png")["labels"] == [BOX]


def test_lists_tell_nothing_in_it_from_not_labelled(client: TestClient) -> None:
    first = edit(client, {"do": "nothing"}).json()["change"]
    found = client.get("/api/pictures").json()["pictures"]
    assert [each["labels"] for each in found] == [0, None, None]
    assert client.get("/api/pictures", params={"since": first}).json()["pictures"] == []
    told = client.get("/api/project").json()
    assert (told["classes"], told["counts"]["changes"]) == (["cat", "dog"], 1)


def test_masks_pass_through(client: TestClient) -> None:
    pixels = np.zeros((20, 30), bool)
    pixels[3:9, 4:8] = True
    mask = to_json(Mask(class_name="dog", pixels=run_lengths_of(pixels)))
    assert edit(client, {"do": "add", "label": mask}).json()["labels"] == [mask]


def test_pictures_are_shown_as_training_sees_them(client: TestClient, folder: Path) -> None:
    grey = Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100)
    grey.save(folder / "deep.png")
    turned = Image.fromarray(np.random.default_rng(5).integers(0, 256, (20, 30, 3), np.uint8))
    exif = turned.getexif()
    exif[274] = 6
    turned.save(folder / "turned.jpg", exif=exif)
    turned.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.random.default_rng(6).integers(0, 256, (20, 30, 4), np.uint8)).save(folder / "alpha.png")
    turned.quantize(9).save(folder / "palette.gif")
    client.post("/api/scan", json={})
    for name in ("deep.png", "turned.jpg", "cmyk.jpg", "alpha.png", "palette.gif"):
        query = {"path": name, "digest": state(client, name)["digest"]}
        answer = client.get("/picture", params=query)
        with Image.open(io.BytesIO(answer.content)) as shown:
            assert np.array_equal(np.array(shown.convert("RGB")), read_picture(folder / name).pixels), name
        small = client.get("/picture", params={**query, "side": 96})
        assert small.headers["content-type"] in {"image/png", "image/jpeg"}
    assert client.get("/picture", params={**query, "side": 5000}).status_code == 400


def test_paths_that_leave_the_folder_are_refused(client: TestClient, folder: Path) -> None:
    (folder.parent / "secret.png").write_bytes((folder / "0.png").read_bytes())
    digest = state(client)["digest"]
    for path in ("../secret.png", str(folder.parent / "secret.png"), "..%2fsecret.png", "", "a\0b", "labels.sqlite"):
        answer = client.get("/picture", params={"path": path, "digest": digest})
        assert answer.status_code == 400, path
        assert edit(client, {"do": "nothing"}, path="0.png").status_code == 200
    # A link in the place of a picture, made after the scan.
    (folder / "0.png").unlink()
    (folder / "0.png").symlink_to(folder.parent / "secret.png")
    answer = client.get("/picture", params={"path": "0.png", "digest": digest})
    assert (answer.status_code, "leads out" in answer.json()["error"]) == (400, True)
    (folder / "1.png").unlink()
    os.mkfifo(folder / "1.png")
    answer = client.get("/picture", params={"path": "1.png", "digest": state(client, "1.png")["digest"]})
    assert (answer.status_code, "no regular file" in answer.json()["error"]) == (400, True)
    for path in ("/page/../application.py", "/page/%2e%2e%2fapplication.py", "/page/", "/labels.sqlite", "/page/x.py"):
        assert client.get(path).status_code == 404, path


def test_the_page_has_no_other_host_and_a_policy(client: TestClient) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("index.html", "label.css", "main.js", "api.js", "store.js", "canvas.js", "shapes.js"):
        text = client.get(f"/page/{name}").text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name


def test_requests_of_other_sites_are_refused(client: TestClient) -> None:
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "169.254.169.254", "", "[::2]:80"):
        assert client.get("/api/project", headers={"host": host}).status_code == 421, host
    for host in ("127.0.0.1:8400", "localhost:1", "[::1]:80", "LOCALHOST"):
        assert client.get("/api/project", headers={"host": host}).status_code == 200, host
    seen = state(client)
    del client.headers["x-multiring"]
    told = {"path": "0.png", "digest": seen["digest"], "after": 0, "author": "eve", "edits": [{"do": "nothing"}]}
    assert client.post("/api/edit", content=json.dumps(told), headers={"content-type": "text/plain"}).status_code == 403
    assert state(client)["change"] == 0


def test_requests_are_bounded(client: TestClient) -> None:
    assert client.post("/api/edit", content=b"x", headers={"content-length": str(MOST_BYTES + 1)}).status_code == 413

    def endless() -> Any:
        for _ in range(MOST_BYTES // (1 << 20) + 1):
            yield bytes(1 << 20)

    assert client.post("/api/edit", content=endless()).status_code == 413
    for body in (
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"a":' * 200_000,
        b"[" * 1_000_000,
        b"1e999",
        b'{"edits":{}}',
        b'{"path":"\\ud800"}',
    ):
        assert client.post("/api/edit", content=body).status_code == 400, body[:20]
    for query in ("x", "1e3", "9" * 100, "-", "٣"):
        assert client.get("/api/pictures", params={"since": query}).status_code == 400, query


def test_other_hosts_need_the_token(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"needs a --token-file"):
        create_application(LabellingService(folder), "0.0.0.0")  # noqa: S104 -- it is refused
    application = create_application(LabellingService(folder), "0.0.0.0", TOKEN)  # noqa: S104 -- with a token
    client = TestClient(asgi(application), base_url="http://10.0.0.7:8400", headers=WRITES)
    assert client.get("/").status_code == client.get("/page/main.js").status_code == 200
    for path in ("/api/project", "/api/picture?path=0.png", "/picture?path=0.png", f"/api/project?token={TOKEN}"):
        assert client.get(path).status_code == 401, path
    for given in (f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", f"Basic {TOKEN}", "Bearer ü"):
        assert client.get("/api/project", headers={"authorization": given.encode()}).status_code == 401, given
    assert client.get("/api/project", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get("/api/project", headers={"cookie": f"{COOKIE}={TOKEN}"}).status_code == 401
    assert client.post("/api/session", json={"token": "wrong"}).status_code == 401
    answer = client.post("/api/session", json={"token": TOKEN})
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert client.get("/api/project").status_code == 200


def test_files_of_tokens_and_ports(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_tokens(file)
    file.touch(0o600)
    for text, said in (
        ("short", "fewer than 16"), ("ü" * 20, "cannot be read"), ("", "has no token"), (f"{TOKEN}\0", "control"),
    ):  # fmt: skip
        file.write_text(text, "utf-8")
        with pytest.raises(ArgumentError, match=said):
            read_tokens(file)
    file.write_text(f"# of the page\n  # which is no token\n\n{TOKEN}\n")
    assert read_tokens(file) == [TOKEN]
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(ArgumentError, match="chmod 600"):
            read_tokens(file)
    assert [is_loopback(each) for each in ("localhost", "127.0.0.2", "::1")] == [True] * 3
    assert not any(is_loopback(each) for each in ("a.localhost", "localhost.example", "0.0.0.0", "10.0.0.1", ""))  # noqa: S104 -- compared only
    with listening_socket("127.0.0.1", 0) as used:
        port = used.getsockname()[1]
        with pytest.raises(ArgumentError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: Address already in use"):
            listening_socket("127.0.0.1", port)
    with pytest.raises(ArgumentError, match="want an address of this machine"):
        listening_socket("no.such.host.invalid", 0)


def test_a_body_that_is_cut_off_reaches_nobody() -> None:
    reached: list[Any] = []

    async def application(*words: Any) -> None:
        reached.append(await words[1]())

    async def unwanted(message: Any) -> None:
        pytest.fail(f"nobody waits for {message}")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"host", b"localhost"), (b"x-multiring", b"1")],
    }
    begin = {"type": "http.request", "body": b"1", "more_body": True}
    for last in ({"type": "http.disconnect"}, {"type": "http.request", "body": b"2"}):
        messages = iter((begin, last))

        async def receive(messages: Any = messages) -> Any:
            return next(messages)

        asyncio.run(Guard(application, "127.0.0.1", None, "cookie")(scope, receive, unwanted))
    assert [each["body"] for each in reached] == [b"12"]


def test_tracks_fill_the_frames_between(client: TestClient, folder: Path) -> None:
    with VisionProject.open(folder) as project:
        project.set_frames({f"{number}.png": ("film", number * 5) for number in range(3)})
    first = {"class": "cat", "track": "t", "box": [0.0, 0.0, 4.0, 4.0]}
    last = {"class": "cat", "track": "t", "box": [10.0, 8.0, 6.0, 4.0]}
    other = {"class": "dog"}
    told = {"video": "film", "track": "t", "author": "ann"}
    edit(client, {"do": "add", "label": first})
    assert state(client, "1.png")["proposals"] == [{"label": first, "score": None, "source": "track"}]
    assert client.post("/api/tracks", json=told).status_code == 400
    edit(client, {"do": "add", "label": last}, path="2.png")
    edit(client, {"do": "add", "label": other}, path="1.png", author="ben")
    done = client.post("/api/tracks", json=told).json()
    middle = {"class": "cat", "track": "t", "attributes": [["interpolated", "1"]], "box": [5.0, 4.0, 5.0, 4.0]}
    assert (done["frames"], state(client, "1.png")["labels"]) == (1, [other, middle])
    assert client.post("/api/tracks", json=told).json() == {"frames": 0, "change": 0}
    client.post("/api/undo", json={"author": "ann", "change": done["change"]})
    assert state(client, "1.png")["labels"] == [other]
    # What somebody saw as empty stays so.
    edit(client, {"do": "nothing"}, path="1.png", author="ben")
    assert client.post("/api/tracks", json=told).json()["frames"] == 0


def test_a_video_becomes_pictures(folder: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    (folder / "films").mkdir()
    writer = cv2.VideoWriter(str(folder / "films" / "a.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10, (32, 24))
    for number in range(6):
        writer.write(np.full((24, 32, 3), number * 40, np.uint8))
    writer.release()
    assert videos_without_frames(folder) == ["films/a.avi"]
    with VisionProject.open(folder) as project:
        made = make_frames(project, "films/a.avi", 2)
        assert made == tuple(f"films/a.avi.frames/{number:06}.jpg" for number in (0, 2, 4))
        found = project.frames_of("films/a.avi")
        assert [(each.path, each.frame) for each in found] == list(zip(made, (0, 2, 4), strict=True))
        assert abs(int(read_picture(folder / made[1]).pixels.mean()) - 80) < 4
        for wrong in ("../a.avi", "0.png", "/etc/passwd"):
            with pytest.raises(ArgumentError, match="want a file inside the folder"):
                make_frames(project, wrong)
        (folder / "bad.mp4").write_bytes(b"no video")
        with pytest.raises(DataError, match=r"bad\.mp4"):
            make_frames(project, "bad.mp4")
    with VisionProject.open(folder) as project:
        project.set_frames(dict.fromkeys(made))  # as if the process had been killed before it stated them
        assert make_frames(project, "films/a.avi", 2) == made
        assert [each.frame for each in project.frames_of("films/a.avi")] == [0, 2, 4]
        with pytest.raises(StateError, match="the video has frames"):
            make_frames(project, "films/a.avi", 2)
    assert videos_without_frames(folder) == ["bad.mp4"]
    assert not list(folder.glob(".*"))


def test_proposals_become_labels_when_accepted(client: TestClient, folder: Path) -> None:
    run = folder / "runs" / "first"
    run.mkdir(parents=True)
    (run / "model.json").write_text(json.dumps({"when": "2026", "digests": {"weights": "ab" * 32}}))
    file = folder / "runs" / "proposals" / f"first.{('ab' * 32)[:16]}.jsonl"
    file.parent.mkdir()
    line = {
        "digest": state(client)["digest"],
        "labels": [BOX, {"class": "dog"}],
        "scores": [0.9, 0.4],
        "confidence": 0.4,
    }
    text = json.dumps(line)
    file.write_text(text[:20])  # a line on its way
    assert state(client)["proposals"] == []
    file.write_text(text + "\n" + text[:9])
    proposed = state(client)["proposals"]
    assert [each["label"] for each in proposed] == [BOX, {"class": "dog"}]
    assert client.get("/api/proposals").json()["confidences"] == {line["digest"]: 0.4}
    told = edit(
        client,
        {"do": "add", "label": BOX, "proposal": BOX},
        {"do": "add", "label": {"class": "cat"}, "proposal": {"class": "dog"}},
        {"do": "add", "label": MOVED, "proposal": MOVED},  # nobody proposed it
    ).json()
    assert (told["accepted"], told["corrections"], len(told["labels"])) == (1, 2, 3)


def test_models_of_clips_propose_nothing(folder: Path) -> None:
    for name, kind, when in (("old", "classify", "2025"), ("new", "act", "2026")):
        run = folder / "runs" / name
        run.mkdir(parents=True)
        (run / "model.json").write_text(json.dumps({"kind": kind, "when": when}))
    assert newest_model(folder) == "old"
    (folder / "runs" / "old" / "model.json").unlink()
    assert newest_model(folder) is None
    with pytest.raises(StateError, match=r"no model of pictures is finished yet: .* of another kind than act"):
        ProposalStore(folder).start()


def test_labels_of_the_page_are_those_of_the_project(client: TestClient, folder: Path) -> None:
    edit(client, {"do": "add", "label": {"class": "dog"}}, {"do": "add", "label": BOX})
    with VisionProject.open(folder) as project:
        found = project.labelling("0.png")
        assert found is not None
        assert found.labels == (Label(class_name="dog"), Box(class_name="cat", left=1, top=2, width=3, height=4))
        assert found.author == "ann"
    assert client.post("/api/classes", json={"rename": "cat", "new": "lion"}).json()["classes"] == ["lion", "dog"]
    assert state(client)["labels"][1]["class"] == "lion"
