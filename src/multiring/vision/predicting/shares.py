"""A rank's share of a prediction: the chunks of pictures, and of each video's frames, that it answers for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multiring.errors import DataError
from multiring.vision.pictures import Pixels, read_picture
from multiring.vision.predicting.inputs import PredictionInput, Video, read_clip, require_unchanged
from multiring.vision.predicting.part_files import ChunkId, PartWriter, Records
from multiring.vision.predicting.predictors import Predictor, answer_values, require_sides

_CHUNK = 16  # pictures or frames that one rank does without a pause
END = -1  # the second number of the line that states how many frames of a video were read
# Pictures of one size in a chunk go through the model together, up to so many, and pixels that wait are bounded. Both
# depend on the chunk alone, so the number of ranks does not change a bit.
_BATCH, _WAITING_PIXELS = 8, 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionShare:
    """What a rank needs to do its share.

    Attributes:
        rank: the rank.
        ranks: the number of ranks.
        predictor: the model.
        inputs: all inputs of the job.
        every: of a video, frames 0, every, 2 * every, ... are answered.
        done: the records of chunks that an earlier start of the job finished.
        part: gets the records of the others.
    """

    rank: int
    ranks: int
    predictor: Predictor
    inputs: Sequence[PredictionInput]
    every: int
    done: Mapping[ChunkId, Records]
    part: PartWriter

    def predict_pictures(self) -> None:
        """Answer for the rank's share of the chunks of pictures that are not done."""
        left = [each for each in picture_chunks(self.inputs) if each[0] not in self.done]
        for number, pictures in left[self.rank :: self.ranks]:
            batch = _Batch(self.predictor)
            for each in pictures:
                record: dict[str, Any] = {each.noun: each.name}
                try:
                    pixels = self._pixels(each)
                    require_unchanged(each)
                    batch.add(record, pixels)
                except DataError as error:
                    batch.add_problem(record, str(error))
            self.part.add(number, batch.records())

    def _pixels(self, each: PredictionInput) -> Pixels:
        if each.is_unread:
            raise DataError(f"picture {each.name!r} has a format that multiring does not read: save it as PNG or JPEG")
        if each.clip_frames:
            return read_clip(Path(each.name), each.clip_frames, self.every)
        return read_picture(Path(each.name)).pixels

    def predict_videos(self) -> dict[str, str]:
        """Answer for the rank's share of the frames of all videos.

        Every rank decodes every video, which costs little beside a model, so each finds the end by itself.

        Returns:
            What this rank found at the end of each video that was not done, by its name. Ranks must find the same.
        """
        found: dict[str, str] = {}
        for number, each in enumerate(self.inputs):
            if not each.is_video or self._is_done(number):
                continue
            told: dict[str, Any] = {"video": each.name, "frames": 0}
            try:
                video = Video(Path(each.name))
                try:
                    self._predict_frames(number, told, video)
                finally:
                    video.close()
                if "error" not in told:
                    require_unchanged(each)
            except DataError as error:
                told["error"] = str(error)
            self.part.add((number, END), [told])
            found[each.name] = json.dumps(told, sort_keys=True)
        return found

    def _predict_frames(self, number: int, told: dict[str, Any], video: Video) -> None:
        """Answer for frames of a video. Count all frames that are answered by some rank in `told`."""
        chunk, batch = 0, _Batch(self.predictor)
        while _grabbed(video, told):
            if (video.frames - 1) % self.every:
                continue
            if told["frames"] == (chunk + 1) * _CHUNK:
                self._add(number, chunk, batch)
                chunk, batch = chunk + 1, _Batch(self.predictor)
            told["frames"] += 1
            if self._is_mine(number, chunk):
                batch.add_frame({"video": told["video"], "frame": video.frames - 1}, video)
        # Only at the end of the frames: a chunk that something interrupted must not look finished.
        if told["frames"]:
            self._add(number, chunk, batch)

    def _add(self, number: int, chunk: int, batch: "_Batch") -> None:
        if self._is_mine(number, chunk):
            self.part.add((number, chunk), batch.records())

    def _is_mine(self, number: int, chunk: int) -> bool:
        return (number, chunk) not in self.done and (number + chunk) % self.ranks == self.rank

    def _is_done(self, number: int) -> bool:
        end = self.done.get((number, END))
        return end is not None and all((number, chunk) in self.done for chunk in video_chunks(end))


def picture_chunks(inputs: Sequence[PredictionInput]) -> list[tuple[ChunkId, list[PredictionInput]]]:
    """Return the chunks of consecutive pictures. The first number of a chunk is that of its first picture.

    A clip is a chunk by itself.
    """
    chunks: list[tuple[ChunkId, list[PredictionInput]]] = []
    for number, each in enumerate(inputs):
        if each.is_video:
            continue
        last = chunks[-1] if chunks else None
        most = 1 if each.clip_frames else _CHUNK
        if last and len(last[1]) < most and last[0][0] + len(last[1]) == number:
            last[1].append(each)
        else:
            chunks.append(((number, 0), [each]))
    return chunks


def video_chunks(end: Records) -> range:
    """Return the chunks of a video from the record of its end."""
    return range(-(-int(end[0]["frames"]) // _CHUNK))


def chunk_frames(chunk: int, frames: int, every: int) -> list[int]:
    """Return the numbers of the frames of a video's chunk, if `frames` frames of the video are answered."""
    return [every * number for number in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, frames))]


def finished(inputs: Sequence[PredictionInput], every: int, found: Mapping[ChunkId, Records]) -> dict[ChunkId, Records]:
    """Return the chunks of an earlier start that need not be answered again.

    The end of a video that could not be read, or not whole, is not among them: the next start may read it. Neither is
    a chunk with other frames than those that the end of its video, or a whole chunk, has.
    """
    kept: dict[ChunkId, Records] = {}
    for (number, chunk), records in found.items():
        if number >= len(inputs):
            continue
        if inputs[number].is_video:
            [end] = found.get((number, END), [{"frames": (chunk + 1) * _CHUNK, "error": ""}])
            is_kept = "error" not in end
            if chunk != END:
                frames = int(end["frames"]) if is_kept else (chunk + 1) * _CHUNK
                is_kept = [each["frame"] for each in records] == chunk_frames(chunk, frames, every)
        else:
            is_kept = True
        if is_kept:
            kept[number, chunk] = records
    return kept


def _grabbed(video: Video, told: dict[str, Any]) -> bool:
    """Advance to the next frame. At the end, or at a damage, which `told` gets, return False."""
    try:
        return video.grab()
    except DataError as error:
        told["error"] = str(error)
        return False


def _named(record: Mapping[str, Any]) -> str:
    return " ".join(f"{name} {record[name]!r}" for name in ("picture", "video", "frame") if name in record)


class _Batch:
    """The pictures of a chunk. Those of one size go through the model together."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._records: Records = []
        self._waiting: dict[tuple[int, ...], list[tuple[dict[str, Any], Pixels]]] = {}
        self._pixels = 0

    def add(self, record: dict[str, Any], pixels: Pixels) -> None:
        """Add a picture, whose record gets its answer.

        Raises:
            DataError: the picture is too long for a model.
        """
        try:
            require_sides(*pixels.shape[-3:-1])
        except DataError as error:
            raise DataError(f"{_named(record)}: {error}") from None
        self._records.append(record)
        same = self._waiting.setdefault(pixels.shape, [])
        same.append((record, pixels))
        self._pixels += pixels.size // 3
        if len(same) == _BATCH:
            self._answer(self._waiting.pop(pixels.shape))
        elif self._pixels > _WAITING_PIXELS:
            self.records()

    def add_frame(self, record: dict[str, Any], video: Video) -> None:
        """Add the current frame of a video."""
        try:
            self.add(record, video.pixels())
        except DataError as error:
            self.add_problem(record, str(error))

    def add_problem(self, record: dict[str, Any], problem: str) -> None:
        """Add a picture that cannot be answered."""
        self._records.append(record)
        record["error"] = problem

    def records(self) -> Records:
        """Answer for the pictures that wait, and return all records in order."""
        for same in self._waiting.values():
            self._answer(same)
        self._waiting.clear()
        return self._records

    def _answer(self, same: Sequence[tuple[dict[str, Any], Pixels]]) -> None:
        """Answer for pictures of one size. One that the model refuses gets the reason, and the others their answers."""
        try:
            answers = self._predictor.predict(np.stack([pixels for _, pixels in same]))
        except DataError as error:
            if len(same) > 1:
                for each in same:
                    self._answer([each])
                return
            record, pixels = same[0]
            record["error"] = f"{_named(record)}: {error}"
            self._pixels -= pixels.size // 3
            return
        for (record, pixels), answer in zip(same, answers, strict=True):
            record.update(answer_values(answer, width=pixels.shape[-2], height=pixels.shape[-3]))
            self._pixels -= pixels.size // 3
