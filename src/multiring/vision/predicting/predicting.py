"""Predict labels for pictures and videos on all ranks of a job, each picture once, in the order of the input."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from multiring._arguments import require_whole
from multiring._replacing import words_of
from multiring._runtime import Group
from multiring.errors import ArgumentError, DataError, MultiringError
from multiring.vision.formats.coco import coco_values
from multiring.vision.formats.label_sets import LabelledPicture, LabelSet
from multiring.vision.labels import from_json
from multiring.vision.predicting.inputs import PredictionInput, find_inputs
from multiring.vision.predicting.part_files import ChunkId, PartFolder, Records, has_bytes, publish
from multiring.vision.predicting.predictors import Predictor
from multiring.vision.predicting.shares import (
    END,
    PredictionShare,
    chunk_frames,
    finished,
    picture_chunks,
    video_chunks,
)

FORMATS = ("jsonl", "coco")
_TEXT_BYTES = 1 << 12

T = TypeVar("T")


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

    The file has a line for each picture or frame, in the order of the input. A model of clips answers once for a video,
    as one clip from its first frame to its last. The file has the same bytes for any number of ranks. If the job was
    killed, the same call goes on from the folder OUT.parts, which all ranks must see.

    Args:
        group: the ranks that take part.
        predictor: the model.
        paths: the files and folders, as of `find_inputs`.
        out: the file to write, which must not be there.
        file_format: "jsonl" or "coco". COCO does not hold the classes of whole pictures.
        every: of a video, frames 0, every, 2 * every, ... are answered.

    Returns:
        What was done. Pictures and problems are told on rank 0 alone.

    Raises:
        ArgumentError: an argument is wrong, a path does not exist, or `out` or its parts are of something else.
        DataError: a folder cannot be read; ranks have other models, inputs or options, or read a video differently; or
            a chunk is missing at the end, because ranks do not see the same folder. The parts are kept.
    """
    parts = PartFolder(out)
    job = PredictionJob(predictor=predictor, paths=tuple(paths), out=out, file_format=file_format, every=every)
    try:
        return _predicted(group, job, parts)
    finally:
        parts.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionJob:
    """What `predict` was asked for; see its arguments."""

    predictor: Predictor
    paths: tuple[Path, ...]
    out: Path
    file_format: str
    every: int

    def inputs(self) -> list[PredictionInput]:
        """Return the inputs, in order."""
        frames = self.predictor.description.frames if self.predictor.takes_clips else 0
        return find_inputs(self.paths, clip_frames=frames)

    def told(self) -> dict[str, Any]:
        """Return what decides the result, for the folder of the parts.

        Raises:
            ArgumentError: an option is wrong.
        """
        kind = self.predictor.description.kind
        if self.file_format not in FORMATS:
            raise ArgumentError(f"format {self.file_format!r}: want one of {', '.join(FORMATS)}")
        if self.file_format == "coco" and kind in {"classify", "act"}:
            raise ArgumentError("COCO holds boxes and masks, and this model answers with a class: want --format jsonl")
        require_whole("every", self.every, 1, wanted="at least 1, a whole number")
        found = [asdict(each) for each in self.inputs()]
        return {
            "inputs": found,
            "model": self.predictor.identity,
            "every": self.every,
            "format": self.file_format,
        }


def _predicted(group: Group, job: PredictionJob, parts: PartFolder) -> PredictionResult:
    predictor, every = job.predictor, job.every
    _together(group, lambda: parts.begin(job.told()), ranks=[0])
    # Each rank lists the inputs itself, because every rank reads them.
    inputs = _together(group, job.inputs)
    done = _together(group, lambda: finished(inputs, every, parts.done()))
    _require_alike(group, len(done), len(inputs))
    alike = {
        "the model": predictor.identity,
        "the files": [(each.name, each.size) for each in inputs],
        "the options": (every, job.file_format),
        "the finished chunks": sorted(done),
    }
    _require_same(group, {name: json.dumps(told, sort_keys=True) for name, told in alike.items()})

    def answer() -> dict[str, str]:
        part = parts.open_part()
        try:
            share = PredictionShare(
                rank=group.rank, ranks=group.size, predictor=predictor, inputs=inputs, every=every, done=done, part=part
            )
            share.predict_pictures()
            return share.predict_videos()
        finally:
            part.close()

    _require_same(group, _together(group, answer))
    tally: Counter[str] = Counter()
    problems: list[str] = []

    def end() -> None:
        lines = _counted(_in_order(inputs, every, parts.done()), tally, problems)
        _finish(parts, job.out, lines if job.file_format == "jsonl" else _coco(lines, predictor, job.out))

    _together(group, end, ranks=[0])
    return PredictionResult(pictures=tally["pictures"], problems=tuple(problems), resumed=len(done))


def _together(group: Group, act: Callable[[], T], *, ranks: Collection[int] | None = None) -> T:
    """Run a function on all or some ranks, and return its result. If it fails on one, raise on every rank.

    Args:
        group: the ranks that call this.
        act: the function.
        ranks: the ranks that run it; the others wait, and get None. Default: all.

    Raises:
        Exception: what the function raised on this rank, but a DataError for an OSError. On ranks where it raised
            nothing: a DataError with the text of the first rank that failed.
    """
    failed: Exception | None = None
    result: Any = None
    try:
        if ranks is None or group.rank in ranks:
            result = act()
    except OSError as error:
        failed = DataError(words_of(error))
    except Exception as error:  # noqa: BLE001 -- the other ranks wait, and must hear of it, whatever it is
        failed = error
    first = np.array([group.size if failed is None else group.rank], np.int64)
    group.all_reduce(first, op="min")
    if first[0] == group.size:
        return cast("T", result)
    text = np.zeros(_TEXT_BYTES, np.uint8)
    if failed is not None:
        said = str(failed) if isinstance(failed, MultiringError) else f"{type(failed).__name__}: {failed}"
        data = said.encode(errors="replace")[:_TEXT_BYTES]
        text[: len(data)] = np.frombuffer(data, np.uint8)
    group.broadcast(text, root=int(first[0]))
    if failed is not None:
        raise failed
    raise DataError(f"rank {first[0]}: {text.tobytes().rstrip(bytes(1)).decode(errors='replace')}")


def _require_alike(group: Group, done: int, inputs: int) -> None:
    """Raise DataError on every rank unless all ranks see the same number of inputs and of finished chunks."""
    counts = np.array([done, inputs, -done, -inputs], np.int64)
    group.all_reduce(counts, op="max")
    if counts[0] != -counts[2] or counts[1] != -counts[3]:
        raise DataError(
            f"ranks see {-counts[3]} to {counts[1]} inputs and {-counts[2]} to {counts[0]} finished chunks: want a "
            "folder that all ranks share, and files that do not change meanwhile"
        )


def _require_same(group: Group, texts: Mapping[str, str]) -> None:
    """Raise DataError on every rank unless each text is the same on all ranks. Names and order must be the same."""
    if not texts:
        return
    digests = [hashlib.sha256(each.encode()).digest()[:8] for each in texts.values()]
    own = np.frombuffer(b"".join(digests), np.int64)
    ends = np.concatenate([own, ~own])  # the largest complement is that of the smallest
    group.all_reduce(ends, op="max")
    for number, name in enumerate(texts):
        if ends[number] != ~ends[len(texts) + number]:
            raise DataError(
                f"{name!r} is not the same on all ranks; on rank {group.rank} it is "
                f"{list(texts.values())[number]:.200}: want the same files and options on all ranks, and files that do "
                "not change meanwhile"
            )


# ---- the result ----


def _finish(parts: PartFolder, out: Path, data: Iterator[bytes]) -> None:
    """Write the result, and remove the parts. Parts are kept if another file has taken the result's place.

    Raises:
        ArgumentError: there is a file at `out` with other bytes.
    """
    if not out.exists():
        publish(out, data)
    elif not has_bytes(out, data):
        raise ArgumentError(
            f"{str(out)!r} was made by something else: it was left as it is, and so were the answers in "
            f"{str(parts.folder)!r}. Move that file away, and give the same command again"
        )
    parts.remove()


def _in_order(
    inputs: Sequence[PredictionInput], every: int, done: Mapping[ChunkId, Records]
) -> Iterator[dict[str, Any]]:
    """Yield the records in the order of the input.

    Raises:
        DataError: a chunk is missing, or has other pictures or frames.
    """
    pictures = dict(picture_chunks(inputs))
    for number, each in enumerate(inputs):
        if each.is_video:
            [end] = _found(done, (number, END), each.name)
            for chunk in video_chunks([end]):
                records = _found(done, (number, chunk), each.name)
                if [record["frame"] for record in records] != chunk_frames(chunk, int(end["frames"]), every):
                    raise DataError(
                        f"a part of {each.name!r} has {len(records)} frames, and not those that its end asks for: give "
                        "the same command again, which answers them anew"
                    )
                yield from records
            if "error" in end:
                yield end
        elif (number, 0) in pictures:
            records, wanted = _found(done, (number, 0), each.name), pictures[number, 0]
            if [record.get(each.noun) for record in records] != [one.name for one in wanted]:
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
