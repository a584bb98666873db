"""DeepLabv3+ with a full-resolution decoder, for fields of many channels.

It has ResNet-50 with an output stride of 8, atrous spatial pyramid pooling at rates 12, 24 and 36, and a decoder of
transposed convolutions up to every pixel of the input. The original interpolates bilinearly from a quarter of it.

Sources: Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation", ECCV 2018,
arXiv:1802.02611; Kurth et al., "Exascale Deep Learning for Climate Analytics", SC18, arXiv:1810.01993.
"""

import torch
from examples.imagenet.resnet import EXPANSION, LAYERS, ResNet, zero_last_gammas
from torch import Tensor, nn

from multiring.vision.models.atrous import AtrousPyramid, dilated

RATES = (12, 24, 36)


def _doubling(inputs: int, outputs: int) -> nn.Sequential:
    """Return a transposed convolution that doubles the resolution."""
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 3, 2, padding=1, output_padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


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
        self.pyramid = AtrousPyramid(width * 8 * EXPANSION, wide, RATES)
        self.early = dilated(wide, width * 3 // 4, 1)
        self.to_quarter = _doubling(wide, wide)
        self.at_quarter = nn.Sequential(dilated(wide + width * 3 // 4, wide), dilated(wide, wide))
        self.to_half = _doubling(wide, wide)
        self.at_half = nn.Sequential(dilated(wide, wide), dilated(wide, wide))
        self.to_full = _doubling(wide, wide)
        self.at_full = nn.Sequential(dilated(wide, wide), dilated(wide, wide), dilated(wide, width * 2))
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
