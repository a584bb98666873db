"""DeepLabv3+ with a full-resolution decoder, for fields of many channels.

It has ResNet-50 with an output stride of 8, atrous spatial pyramid pooling at rates 12, 24 and 36, and a decoder of
transposed convolutions up to every pixel of the input. The original interpolates bilinearly from a quarter of it.

Sources: Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation", ECCV 2018,
arXiv:1802.02611; Kurth et al., "Exascale Deep Learning for Climate Analytics", SC18, arXiv:1810.01993.
"""

import torch
from examples.imagenet.resnet import EXPANSION, LAYERS, ResNet, zero_last_gammas
from torch import Tensor, nn

RATES = (12, 24, 36)


def _convolution(inputs: int, outputs: int, size: int = 3, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (size // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=padding, dilation=dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def _doubling(inputs: int, outputs: int) -> nn.Sequential:
    """Return a transposed convolution that doubles the resolution."""
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 3, 2, padding=1, output_padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class AtrousPyramid(nn.Module):
    """Features of each pixel's surroundings: a 1x1 convolution, three dilated ones, and the mean of the image.

    Unlike the original, the mean passes no batch norm: it has one value per sample and channel. With one sample per
    rank a batch norm would have nothing to normalise by, and with a few samples too little.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [_convolution(inputs, width, 1), *(_convolution(inputs, width, 3, r) for r in RATES)]
        )
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, width, 1), nn.ReLU(inplace=True))
        self.project = _convolution(width * (len(RATES) + 2), width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (n, width, h, w) for input of shape (n, inputs, h, w)."""
        mean = self.mean(x).expand(-1, -1, x.shape[2], x.shape[3])
        projected: Tensor = self.project(torch.cat([*(branch(x) for branch in self.branches), mean], 1))
        return projected


class DeepLabV3Plus(nn.Module):
    """A network that returns logits (n, classes, h, w) for fields (n, channels, h, w); h and w are multiples of 8.

    Args:
        channels: the number of channels of a field.
        classes: the number of classes of a pixel.
        width: 64 is the published network; a quarter of it needs 1/16 of the arithmetic.
    """

    def __init__(self, channels: int = 16, classes: int = 3, width: int = 64) -> None:
        super().__init__()
        self.encoder = ResNet(LAYERS["resnet50"], 1, channels, width, output_stride=8)
        del self.encoder.fc, self.encoder.avgpool
        zero_last_gammas(self.encoder)
        wide = width * EXPANSION
        self.pyramid = AtrousPyramid(width * 8 * EXPANSION, wide)
        self.early = _convolution(wide, width * 3 // 4, 1)
        self.to_quarter = _doubling(wide, wide)
        self.at_quarter = nn.Sequential(_convolution(wide + width * 3 // 4, wide), _convolution(wide, wide))
        self.to_half = _doubling(wide, wide)
        self.at_half = nn.Sequential(_convolution(wide, wide), _convolution(wide, wide))
        self.to_full = _doubling(wide, wide)
        self.at_full = nn.Sequential(_convolution(wide, wide), _convolution(wide, wide), _convolution(wide, width * 2))
        self.classify = nn.Conv2d(width * 2, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes of every pixel."""
        if x.shape[2] % 8 or x.shape[3] % 8:
            raise ValueError(f"fields of {x.shape[2]} x {x.shape[3]} pixels: want height and width in multiples of 8")
        early, x = self.encoder.features(x)
        x = torch.cat([self.to_quarter(self.pyramid(x)), self.early(early)], 1)
        x = self.at_half(self.to_half(self.at_quarter(x)))
        logits: Tensor = self.classify(self.at_full(self.to_full(x)))
        return logits
