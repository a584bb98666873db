"""A centre-point detector: a heat map of centres for each class, and the distances from a centre to its box's sides.

Peaks of the heat map are found by max pooling, so no step suppresses boxes one after another, and the whole detector
is one graph.

Sources: Zhou, Wang, Krähenbühl, "Objects as Points", 2019, arXiv:1904.07850; Liu et al., "Training-Time-Friendly
Network for Real-Time Object Detection", AAAI 2020, arXiv:1909.00700, for boxes that are learnt in a part of their area.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d, softplus

from multiring.vision.models.residual import PictureEncoder, convolution

STRIDE = 4  # pixels of the square for a cell of the maps
SIDES = 4  # left, top, right, bottom
MOST_BOXES = 100  # of a picture
_DISTANCE = 16.0  # pixels of the square for 1 of the network's output
_ALIKE = 1e-4  # by which the logit of a cell may be below that of a peak beside it, and still counts as equal
_NO_PEAK = -1e4  # the logit of cells that are no peaks: finite in every type, and below those that networks compute
_FIRST_SCORE = -4.0  # the logit of a new network's scores: almost no cell is a centre


class FeaturePyramid(nn.Module):
    """Features at a quarter of the resolution that know of the lower resolutions, too.

    Args:
        channels: of the encoder's outputs.
        width: of the features.
    """

    def __init__(self, channels: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList([convolution(each, width, size=1) for each in channels])
        self.smooth = nn.ModuleList([convolution(width, width) for _ in channels[1:]])

    def forward(self, features: list[Tensor]) -> Tensor:
        """Return features (n, width, h / 4, w / 4) from the encoder's outputs, highest resolution first."""
        x: Tensor = self.lateral[-1](features[-1])
        for number in range(len(features) - 2, -1, -1):
            x = interpolate(x, scale_factor=2.0, mode="nearest") + self.lateral[number](features[number])
            x = self.smooth[number](x)
        return x


class CentrePointDetector(nn.Module):
    """A network that returns maps of centres and boxes.

    Args:
        encoder: returns features of pictures.
        classes: the number of classes.
        width: channels of the features that the maps are computed from.
    """

    def __init__(self, encoder: PictureEncoder, classes: int, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.pyramid = FeaturePyramid(encoder.channels, width)
        last = nn.Conv2d(width, classes, 1)
        nn.init.normal_(last.weight, std=0.01)
        nn.init.constant_(last.bias, _FIRST_SCORE)  # type: ignore[arg-type]
        self.centres = nn.Sequential(convolution(width, width), last)
        self.sides = nn.Sequential(convolution(width, width), nn.Conv2d(width, SIDES, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return maps (n, classes + 4, h / 4, w / 4) for pictures (n, 3, h, w).

        The first maps are logits of centres by class; the last four become distances by `side_distances`.
        """
        features = self.pyramid(self.encoder(x))
        return torch.cat([self.centres(features), self.sides(features)], 1)


def boxes_of_maps(sides: Tensor) -> Tensor:
    """Return the box of each cell, left, top, right, bottom in pixels of the square: (n, 4, rows, columns).

    Args:
        sides: the last four maps of the network.
    """
    rows, columns = sides.shape[2], sides.shape[3]
    distances = softplus(sides) * _DISTANCE
    xs = (torch.arange(columns, dtype=sides.dtype, device=sides.device) + 0.5) * STRIDE
    ys = (torch.arange(rows, dtype=sides.dtype, device=sides.device) + 0.5) * STRIDE
    return torch.stack(
        [
            xs[None, None, :] - distances[:, 0],
            ys[None, :, None] - distances[:, 1],
            xs[None, None, :] + distances[:, 2],
            ys[None, :, None] + distances[:, 3],
        ],
        1,
    )


def best_boxes(maps: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the boxes of the highest peaks, in pixels of the square, with their scores and classes.

    Args:
        maps: the network's output.
        classes: the number of classes.

    Returns:
        Boxes (n, k, 4), scores (n, k) and classes (n, k), int64, by falling score. If there are fewer peaks, the last
        scores, boxes and classes are 0.
    """
    # Rounding differs between libraries. Cells that differ by less are all peaks, so that it does not decide. Logits
    # decide, because onnxruntime's sigmoid differs from torch's ten times as much as its logits do.
    heat = maps[:, :classes]
    is_peak = heat >= max_pool2d(heat, 3, 1, 1) - _ALIKE
    cells = maps.shape[2] * maps.shape[3]
    peaks = torch.where(is_peak, heat, torch.full_like(heat, _NO_PEAK)).flatten(1)
    logits, places = peaks.topk(min(MOST_BOXES, classes * cells), dim=1)
    is_one = logits > 0.5 * _NO_PEAK
    scores = logits.sigmoid() * is_one.to(logits.dtype)
    boxes = boxes_of_maps(maps[:, classes:]).flatten(2).transpose(1, 2)
    chosen = (places % cells)[:, :, None].expand(-1, -1, SIDES)
    found = boxes.gather(1, chosen) * is_one[:, :, None].to(boxes.dtype)
    return found, scores, torch.div(places, cells, rounding_mode="floor") * is_one.to(torch.int64)
