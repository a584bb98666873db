"""`Predictor`: a trained model, from a run's folder or an exported file, that answers for pictures."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from multiring.vision.exporting.exported_files import description_of
from multiring.vision.exporting.sessions import ExportedSession
from multiring.vision.labels import to_json
from multiring.vision.models.answers import Prediction, predictions_of
from multiring.vision.models.description import WEIGHTS, ModelDescription, read_description
from multiring.vision.pictures import PictureTooLargeError, Pixels

Answers = Mapping[str, NDArray[Any]]
# The resize inside a model makes a matrix: a row for each pixel of its square, a column for each pixel of a side.
MOST_SIDE = 1 << 14


class Predictor:
    """A trained model that answers for pictures.

    Attributes:
        description: what the model is.
        digest: SHA-256 of the file with the weights, as hexadecimal digits.
        threads: threads of one call.
    """

    def __init__(
        self, description: ModelDescription, digest: str, answer: Callable[[Pixels], Answers], *, threads: int = 1
    ) -> None:
        self.description = description
        self.digest = digest
        self.threads = threads
        self._answer = answer

    @property
    def identity(self) -> dict[str, str | int]:
        """Everything that the bits of an answer depend on: the weights, the description beside them, the threads."""
        described = hashlib.sha256(self.description.to_json().encode()).hexdigest()
        return {"weights": self.digest, "description": described, "threads": self.threads}

    @classmethod
    def open(cls, path: Path, *, threads: int = 1) -> "Predictor":
        """Load a model.

        Args:
            path: an exported file, which onnxruntime runs, or a run's folder, which torch runs.
            threads: threads of one call. With other numbers, the last bits of scores may differ.

        Raises:
            DataError: there is no model, or its files do not belong together.
            UnsupportedError: onnxruntime or torch is not installed.
        """
        if path.is_dir():
            return cls(*_of_run(path, threads), threads=threads)
        session = ExportedSession.open(path, threads=threads)
        described = description_of(session.model, repr(str(path)))
        return cls(described, session.model.digest, lambda pixels: session.run({"pixels": pixels}), threads=threads)

    @property
    def takes_clips(self) -> bool:
        """Whether the model answers for clips of `description.frames` frames, and not for pictures."""
        return self.description.kind == "act"

    def predict(self, pixels: Pixels) -> list[Prediction]:
        """Return the answers for pictures or clips of one size.

        Args:
            pixels: uint8, (n, height, width, 3), or (n, frames, height, width, 3) for a model of clips.

        Raises:
            DataError: as of `require_sides` and `predictions_of`.
        """
        require_sides(pixels.shape[-3], pixels.shape[-2])
        return predictions_of(self.description, self._answer(pixels))


def require_sides(height: int, width: int) -> None:
    """Raise PictureTooLargeError if a picture is too long for a model.

    Raises:
        PictureTooLargeError: a side has more than 16,384 pixels.
    """
    if max(height, width) > MOST_SIDE:
        raise PictureTooLargeError(f"a picture of {width} x {height} pixels: want sides of at most {MOST_SIDE}")


def answer_values(answer: Prediction, width: int, height: int) -> dict[str, Any]:
    """Return the answer for a picture as values that JSON holds."""
    labels = [{**to_json(label), "score": score} for label, score in zip(answer.labels, answer.scores, strict=True)]
    return {"width": width, "height": height, "labels": labels, "confidence": answer.confidence}


def _of_run(folder: Path, threads: int) -> tuple[ModelDescription, str, Callable[[Pixels], Answers]]:
    description = read_description(folder)
    # Only a run's folder needs torch.
    import torch  # noqa: PLC0415

    from multiring.vision.models.vision_model import load_model  # noqa: PLC0415

    model = load_model(folder)
    torch.set_num_threads(threads)

    def answer(pixels: Pixels) -> Answers:
        with torch.inference_mode():
            return {name: each.numpy() for name, each in model(torch.from_numpy(pixels)).items()}

    return description, hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(), answer
