"""Predict labels for pictures and videos on all ranks of a job, each picture once, in the order of the input."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multiring._runtime import Group
from multiring.errors import ArgumentError, DataError, MultiringError
from multiring.vision.formats.coco import coco_values
from multiring.vision.formats.label_sets import LabelledPicture, LabelSet
from multiring.vision.labels import from_json
from multiring.vision.predicting.inputs import PredictionInput, find_inputs
from multiring.vision.predicting.part_files import ChunkId, PartFolder, Records, publish, require_new
from multiring.vision.predicting.predictors import Predictor
from multiring.vision.predicting.shares import END, PredictionShare, picture_chunks, video_chunks

FORMATS = ("jsonl", "coco")
_TEXT_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionResult:
    """What a prediction did.

    Attributes:
        pictures: pictures and frames that were answered.
        problems: a sentence for each file that could not be read, or only in part, in order.
        resumed: how many chunks an earlier start of the job had finished.
    """

    pictures: int
    problems: tuple[str, ...]
    resumed: int


def predict(
    group: Group,
    predictor: Predictor,
    paths: Sequence[Path],
    out: Path,
    *,
    file_format: str = "jsonl",
    every: int = 1,
) -> PredictionResult:
    """Answer for pictures, folders of pictures and videos, and write one file. Every rank calls it.

    The file has a line for each picture or frame, in the order of the input. It has the same bytes for any number of
    ranks. If the job was killed, the same call goes on from the folder OUT.parts, which all ranks must see.

    Args:
        group: the ranks that take part.
        predictor: the model.
        paths: the files and folders, as of `find_inputs`.
        out: the file to write, which must not be there.
        file_format: "jsonl" or "coco". COCO does not hold the classes of whole pictures.
        every: of a video, frames 0, every, 2 * every, ... are answered.

    Returns:
        What was done, on every rank.

    Raises:
        ArgumentError: an argument is wrong, a path does not exist, or `out` or its parts are of something else.
        DataError: a chunk is missing at the end, because ranks do not see the same folder.
    """
    parts = PartFolder(out)

    def begin() -> None:
        if file_format not in FORMATS:
            raise ArgumentError(f"format {file_format!r}: want one of {', '.join(FORMATS)}")
        if file_format == "coco" and predictor.description.kind == "classify":
            raise ArgumentError("COCO holds boxes and masks, and this model answers with a class: want --format jsonl")
        if every < 1:
            raise ArgumentError(f"every {every}: want at least 1")
        told = {"inputs": [asdict(each) for each in find_inputs(paths)], "model": predictor.digest, "every": every}
        job = {**told, "format": file_format}
        # A kill between the last two steps of a job leaves the whole result and some of its parts.
        if not parts.is_of(job):
            require_new(out)
        parts.begin(job)

    _together(group, begin)
    # Inputs are listed once more on each rank; a difference would leave chunks missing, which the last step finds.
    inputs = find_inputs(paths)
    done = parts.done()
    _require_alike(group, len(done), len(inputs))
    part = parts.open_part()
    try:
        share = PredictionShare(
            rank=group.rank, ranks=group.size, predictor=predictor, inputs=inputs, every=every, done=done, part=part
        )
        share.predict_pictures()
        share.predict_videos()
    finally:
        part.close()
    group.barrier()
    results: list[PredictionResult] = []

    def end() -> None:
        records = _in_order(inputs, parts.done())
        tally: Counter[str] = Counter()
        problems: list[str] = []
        lines = _counted(records, tally, problems)
        if out.exists():
            list(lines)
        else:
            publish(out, lines if file_format == "jsonl" else _coco(lines, predictor, out))
        parts.remove()
        results.append(PredictionResult(pictures=tally["pictures"], problems=tuple(problems), resumed=len(done)))

    _together(group, end)
    return results[0] if results else PredictionResult(pictures=0, problems=(), resumed=len(done))


def _together(group: Group, act: Callable[[], None]) -> None:
    """Run a function on rank 0. If it fails, raise its error on every rank.

    Raises:
        MultiringError: what the function raised; on other ranks a DataError of the same text.
    """
    failed: Exception | None = None
    if group.rank == 0:
        try:
            act()
        except MultiringError as error:
            failed = error
        except OSError as error:
            failed = DataError(f"{error.filename or 'a file'!r}: {error.strerror or error}")
    text = np.zeros(_TEXT_BYTES, np.uint8)
    if failed is not None:
        said = (str(failed) or type(failed).__name__).encode()[:_TEXT_BYTES]
        text[: len(said)] = np.frombuffer(said, np.uint8)
    group.broadcast(text)
    if failed is not None:
        raise failed
    if text.any():
        raise DataError(f"rank 0: {text.tobytes().rstrip(bytes(1)).decode(errors='replace')}")


def _require_alike(group: Group, done: int, inputs: int) -> None:
    """Raise DataError on every rank unless all ranks see the same number of inputs and of finished chunks."""
    counts = np.array([done, inputs, -done, -inputs], np.int64)
    group.all_reduce(counts, op="max")
    if counts[0] != -counts[2] or counts[1] != -counts[3]:
        raise DataError(
            f"ranks see {-counts[3]} to {counts[1]} inputs and {-counts[2]} to {counts[0]} finished chunks: want a "
            "folder that all ranks share, and files that do not change meanwhile"
        )


# ---- the result ----


def _in_order(inputs: Sequence[PredictionInput], done: Mapping[ChunkId, Records]) -> Iterator[dict[str, Any]]:
    """Yield the records in the order of the input.

    Raises:
        DataError: a chunk is missing, or has other pictures.
    """
    pictures = dict(picture_chunks(inputs))
    for number, each in enumerate(inputs):
        if each.is_video:
            [end] = _found(done, (number, END), each.name)
            for chunk in video_chunks([end]):
                yield from _found(done, (number, chunk), each.name)
            if "error" in end:
                yield end
        elif (number, 0) in pictures:
            records = _found(done, (number, 0), each.name)
            if [record["picture"] for record in records] != [one.name for one in pictures[number, 0]]:
                raise DataError(f"the part with {each.name!r} has other pictures: the files changed meanwhile")
            yield from records


def _found(done: Mapping[ChunkId, Records], chunk: ChunkId, name: str) -> Records:
    if chunk not in done:
        raise DataError(f"no rank has written the answers for {name!r}: want a folder for --out that all ranks share")
    return done[chunk]


def _counted(records: Iterator[dict[str, Any]], tally: Counter[str], problems: list[str]) -> Iterator[bytes]:
    for each in records:
        if "error" in each:
            problems.append(each["error"])
        else:
            tally["pictures"] += 1
        yield json.dumps(each, ensure_ascii=False).encode() + b"\n"


def _coco(lines: Iterator[bytes], predictor: Predictor, out: Path) -> Iterator[bytes]:
    """Yield the text of a COCO file. Pictures that could not be read are in its list "unreadable"."""
    pictures: list[LabelledPicture] = []
    scores: dict[str, list[float]] = {}
    unreadable: list[dict[str, str]] = []
    for told in map(json.loads, lines):
        name = told.get("picture", told.get("video"))
        if "frame" in told:
            name = f"{name}/frame-{told['frame']:06}"
        if "error" in told:
            unreadable.append({"file_name": name, "error": told["error"]})
            continue
        labels = tuple(map(from_json, told["labels"]))
        scores[name] = [each["score"] for each in told["labels"]]
        pictures.append(
            LabelledPicture(
                path=name,
                width=told["width"],
                height=told["height"],
                labels=labels,
                video=told.get("video"),
                frame=told.get("frame"),
            )
        )
    values = coco_values(
        LabelSet(root=out.parent, classes=predictor.description.classes, pictures=tuple(pictures)), scores
    )
    yield json.dumps({**values, "unreadable": unreadable}, ensure_ascii=False).encode() + b"\n"
