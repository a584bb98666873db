"""Turn pictures of any size into what a network sees, with operations that torch.export and ONNX take.

Training, scoring, prediction and exported models all use these functions, so a picture means the same everywhere.

A picture is resized by a triangle filter, as wide as a pixel of the smaller picture, so that nothing is aliased. That
is Pillow's BILINEAR. The filter is separable: two products with matrices, which are computed from the picture's height
and width inside the graph. Values are rounded to whole numbers of 0 to 255, so that training can keep resized
pictures as bytes and still sees exactly what a trained model sees later.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Sums of a few eighths end in exactly .5 often, and rounding of floats would decide them, differently in each library.
# This much more than a half decides them everywhere alike. It is exact in binary.
_ROUNDING = 0.501953125


def axis_weights(outputs: int, inputs: int, ratio: Tensor) -> Tensor:
    """Return the weights of a resize along an axis, (outputs, inputs), float32.

    Args:
        outputs: the number of pixels after the resize.
        inputs: the number of pixels before it.
        ratio: pixels before it for one pixel after it, a scalar. Outputs that lie beyond the inputs get weights 0.
    """
    device = ratio.device
    centres = (torch.arange(outputs, dtype=torch.float32, device=device) + 0.5) * ratio
    places = torch.arange(inputs, dtype=torch.float32, device=device) + 0.5
    support = ratio.clamp(min=1.0)
    weights = (1.0 - ((centres[:, None] - places[None, :]) / support).abs()).clamp(min=0.0)
    is_inside = (centres[:, None] < inputs).to(torch.float32)
    return weights * is_inside / weights.sum(1, keepdim=True).clamp(min=1e-6)


def side_ratios(height: int, width: int, size: int, fit: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a picture's pixels for one pixel of the square, down and across, as scalars.

    Args:
        height: of the picture, in pixels.
        width: of the picture, in pixels.
        size: the side of the square.
        fit: "stretch" or "letterbox".
        device: of the result.
    """
    # Python numbers would become constants of an exported graph.
    down = torch.scalar_tensor(height, dtype=torch.float32, device=device) / size
    across = torch.scalar_tensor(width, dtype=torch.float32, device=device) / size
    if fit == "letterbox":
        down = across = torch.maximum(down, across)
    return down, across


def resize_pictures(pixels: Tensor, size: int, fit: str) -> Tensor:
    """Return pictures as squares, float32 (n, 3, size, size), of whole numbers from 0 to 255.

    Args:
        pixels: uint8 (n, height, width, 3), red, green and blue.
        size: the side of the square.
        fit: "stretch" or "letterbox"; a letterbox's free end, on the right or below, is black.
    """
    height, width = pixels.shape[1], pixels.shape[2]
    down, across = side_ratios(height, width, size, fit, pixels.device)
    values = pixels.permute(0, 3, 1, 2).to(torch.float32)
    values = torch.matmul(axis_weights(size, height, down), values)
    values = torch.matmul(values, axis_weights(size, width, across).transpose(0, 1))
    return torch.floor(values + _ROUNDING)


def prepare_picture(pixels: NDArray[np.uint8], size: int, fit: str) -> NDArray[np.uint8]:
    """Return one picture as the square that a network sees, uint8 (size, size, 3).

    Args:
        pixels: uint8 (height, width, 3), as `read_picture` returns them.
        size: the side of the square.
        fit: "stretch" or "letterbox".
    """
    with torch.no_grad():
        square = resize_pictures(torch.from_numpy(np.ascontiguousarray(pixels))[None], size, fit)[0]
    found: NDArray[np.uint8] = np.ascontiguousarray(square.permute(1, 2, 0).to(torch.uint8).numpy())
    return found


def resize_classes(classes: NDArray[np.uint8], size: int, fit: str, fill: int) -> NDArray[np.uint8]:
    """Return the classes of a picture's pixels as the square that a network learns, by the nearest pixel.

    Args:
        classes: uint8 (height, width).
        size: the side of the square.
        fit: "stretch" or "letterbox".
        fill: the class of the letterbox's free end.
    """
    height, width = classes.shape
    down, across = (float(each) for each in side_ratios(height, width, size, fit, torch.device("cpu")))
    rows, columns = (((np.arange(size) + 0.5) * each).astype(np.int64) for each in (down, across))
    found: NDArray[np.uint8] = classes[np.minimum(rows, height - 1)[:, None], np.minimum(columns, width - 1)[None, :]]
    found[rows >= height] = fill
    found[:, columns >= width] = fill
    return found


def symmetric_pictures(squares: Tensor, count: int) -> Tensor:
    """Return the symmetric pictures of square pictures, (count * n, ..., side, side).

    Args:
        squares: (n, ..., side, side).
        count: 1: the pictures themselves; 2: also mirrored, left and right; 4: all turns by 90 degrees; 8: all turns,
            and all turns of the mirrored pictures. All n pictures of one symmetry come before those of the next.
    """
    found = [squares]
    if count >= 4:
        found += [torch.rot90(squares, turns, (-2, -1)) for turns in (1, 2, 3)]
    if count in {2, 8}:
        found += [each.flip(-1) for each in found]
    return torch.cat(found)


def normalise(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return values of 0 to 255, (..., 3, height, width), with the mean 0 and the deviation 1 of a data set.

    Args:
        values: of any floating type.
        mean: of red, green and blue in 0 to 1, (3, 1, 1).
        std: of red, green and blue in 0 to 1, (3, 1, 1).
    """
    return (values / 255 - mean) / std
