"""`VisionModel`: a trained network with its preprocessing, from pixels of any size to answers."""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from multiring._replacing import replace_file
from multiring.data.readers.limits import library
from multiring.errors import DataError
from multiring.vision.models.architectures import build_network
from multiring.vision.models.description import WEIGHTS, ModelDescription, read_description, write_description
from multiring.vision.models.detector import best_boxes
from multiring.vision.models.preprocessing import (
    axis_weights,
    normalise,
    resize_pictures,
    side_ratios,
    symmetric_pictures,
)

# In the header of our files of weights: the digest of what the description says on the model's function. It is the only
# text there, because safetensors writes several in an order of chance, and then equal weights would be unequal files.
_KEY = "multiring_model"


class VisionModel(nn.Module):
    """A network with its preprocessing.

    Attributes:
        description: what the model is.
        network: takes normalised squares. See docs/vision.md for the networks of the kinds.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, description: ModelDescription) -> None:
        super().__init__()
        self.description = description
        self.network = build_network(description)
        self.register_buffer("mean", torch.tensor(description.mean).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(description.std).reshape(3, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return the answers for pictures or clips of one size.

        Args:
            pixels: uint8 (n, height, width, 3), red, green and blue, of any height and width. For the kind "act":
                (n, frames, height, width, 3), with the description's number of frames.

        Returns:
            For the kinds "classify" and "act": "probabilities" of the classes, float32 (n, classes). What a row lacks
            to 1 is the probability of "nothing"; it is 0 if the model was trained without such samples.
            For "detect": "boxes", float32 (n, k, 4), left, top, right and bottom in pixels of the input; "scores",
            float32 (n, k), 0 to 1 and falling; "classes", int64 (n, k). Rows of score 0 are no boxes.
            For "segment": "classes", uint8 (n, height, width), 0 for nothing, 1 for the first class; and "confidence",
            float32 (n,), the mean over the pixels of the chosen class's probability.
        """
        description, size = self.description, self.description.size
        sides = pixels.shape[-3], pixels.shape[-2]
        if description.kind == "act":
            squares = resize_pictures(pixels.flatten(0, 1), size, description.fit)
            return self.answers(self.outputs(squares.reshape(-1, description.frames, 3, size, size)), sides)
        return self.answers(self.outputs(resize_pictures(pixels, size, description.fit)), sides)

    def outputs(self, squares: Tensor) -> Tensor:
        """Return the network's outputs for squares of 0 to 255, in the type of its weights.

        In evaluation mode, if the description has symmetries, they are the logarithms of the means of the symmetric
        pictures' probabilities, so that their softmax is these means. Training sees the squares alone.

        Args:
            squares: (n, 3, size, size), or (n, frames, 3, size, size) for the kind "act".
        """
        inputs = normalise(squares.to(self.mean.dtype), self.mean, self.std)
        count = 1 if self.training else self.description.symmetries
        if count == 1:
            found: Tensor = self.network(inputs)
            return found
        logits = self.network(symmetric_pictures(inputs, count)).unflatten(0, (count, -1))
        summed: Tensor = logits.log_softmax(2).logsumexp(0)
        return summed - math.log(count)

    def answers(self, outputs: Tensor, sides: tuple[int, int]) -> dict[str, Tensor]:
        """Return the answers of `forward` from the network's outputs.

        Args:
            outputs: of `outputs`.
            sides: the height and the width of the pictures in pixels.
        """
        description = self.description
        if description.kind in {"classify", "act"}:
            return {"probabilities": outputs.softmax(1)[:, : len(description.classes)]}
        height, width = sides
        down, across = side_ratios(height, width, description.size, description.fit, outputs.device)
        if description.kind == "segment":
            return self._classes_of_pixels(outputs, sides, (down, across))
        boxes, scores, classes = best_boxes(outputs, len(description.classes))
        boxes = boxes * torch.stack([across, down, across, down])
        ends = torch.stack([_scalar(each, outputs) for each in (width, height, width, height)])
        return {"boxes": torch.minimum(boxes.clamp(min=0.0), ends), "scores": scores, "classes": classes}

    def _classes_of_pixels(
        self, logits: Tensor, sides: tuple[int, int], ratios: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        """Return the class of each pixel of the input; logits are interpolated between their cells' centres."""
        (height, width), (down, across) = sides, ratios
        cell = self.description.size // logits.shape[2]
        rows = axis_weights(height, logits.shape[2], 1 / (cell * down))
        columns = axis_weights(width, logits.shape[3], 1 / (cell * across))
        spread = torch.matmul(torch.matmul(rows, logits), columns.transpose(0, 1))
        sure, classes = spread.softmax(1).max(1)
        return {"classes": classes.to(torch.uint8), "confidence": sure.mean((1, 2))}


def _scalar(number: int, like: Tensor) -> Tensor:
    return torch.scalar_tensor(number, dtype=torch.float32, device=like.device)


def load_model(folder: Path | str) -> VisionModel:
    """Load the trained model of a run, in eval mode, on the host.

    Args:
        folder: the run's folder, with model.json and model.safetensors.

    Raises:
        DataError: a file is missing or damaged, or the weights are not those that model.json describes.
        UnsupportedError: safetensors is not installed.
    """
    description = read_description(folder)
    path = Path(folder) / WEIGHTS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror or error}; train the model again") from error
    found, named = hashlib.sha256(data).hexdigest(), description.digests.get("weights", "")
    if found != named:
        raise DataError(
            f"{str(path)!r} has the digest {found[:16]}, but its model.json names {named[:16] or 'none'}: the "
            "files are not of one training; copy both again"
        )
    model = VisionModel(description)
    try:
        model.network.load_state_dict(library("safetensors.torch", "vision").load(data))
    except Exception as error:  # safetensors has its own exceptions
        raise DataError(f"{str(path)!r} does not fit its model.json: {str(error)[:300]}") from error
    if _header(data).get(_KEY) != description.function_digest:
        raise DataError(
            f"{str(path)!r} was trained with other classes, another preprocessing or another network than its "
            "model.json says: want the model.json that its training wrote"
        )
    return model.eval()


def save_model(folder: Path, model: VisionModel, described: ModelDescription) -> ModelDescription:
    """Write model.safetensors and model.json into a run's folder, and return the description with the weights' digest.

    Args:
        folder: the run's folder.
        model: the model; the network's weights are saved in float32.
        described: the description, to which the digest of the weights is added.
    """
    state = {
        name: (each.float() if each.is_floating_point() else each).detach().cpu().contiguous().clone()
        for name, each in model.network.state_dict().items()
    }
    data: bytes = library("safetensors.torch", "vision").save(state, metadata={_KEY: described.function_digest})
    values = {name: getattr(described, name) for name in described.__dataclass_fields__}
    values["digests"] = {**described.digests, "weights": hashlib.sha256(data).hexdigest()}
    written = ModelDescription(**values)
    replace_file(folder / WEIGHTS, data, is_ours=_is_ours, what="a file of weights")
    write_description(folder, written)
    return written


def _is_ours(data: bytes) -> bool:
    """Return whether a safetensors file has this module's mark in its header."""
    return _KEY in _header(data)


def _header(data: bytes) -> dict[str, str]:
    """Return the texts in the header of a safetensors file; none if it is damaged."""
    try:
        found = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    except (ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}
