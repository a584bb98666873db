"""The parts of DeepLabv3+, for pictures and for fields of many channels.

Source: Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation", ECCV 2018,
arXiv:1802.02611.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def dilated(inputs: int, outputs: int, size: int = 3, dilation: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the resolution, with batch norm and ReLU."""
    padding = dilation * (size // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=padding, dilation=dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class AtrousPyramid(nn.Module):
    """Features of each pixel's surroundings: a 1x1 convolution, dilated ones, and the mean of the image.

    Unlike the original, the mean passes no batch norm: it has one value per sample and channel. With one sample per
    rank a batch norm would have nothing to normalise by, and with a few samples too little.

    Args:
        inputs: channels of the input.
        width: channels of the output.
        rates: the dilations.
    """

    def __init__(self, inputs: int, width: int, rates: Sequence[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList([dilated(inputs, width, 1), *(dilated(inputs, width, 3, r) for r in rates)])
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, width, 1), nn.ReLU(inplace=True))
        self.project = dilated(width * (len(rates) + 2), width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (n, width, h, w) for input of shape (n, inputs, h, w)."""
        mean = self.mean(x).expand(-1, -1, x.shape[2], x.shape[3])
        projected: Tensor = self.project(torch.cat([*(branch(x) for branch in self.branches), mean], 1))
        return projected
