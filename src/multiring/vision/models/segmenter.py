"""DeepLabv3+ for pictures: an atrous pyramid on the encoder's output, and a decoder with its higher resolutions."""

from torch import Tensor, nn

from multiring.vision.models.atrous import AtrousPyramid
from multiring.vision.models.detector import FeaturePyramid
from multiring.vision.models.residual import PictureEncoder, convolution

_RATES = (2, 4)  # dilations at 1/32 of the resolution; a square has few cells there


class PictureSegmenter(nn.Module):
    """A network that returns logits of each pixel's class, at a quarter of the resolution.

    Unlike the original, the decoder takes all of the encoder's resolutions, so that the encoder needs no dilation.

    Args:
        encoder: returns features of pictures.
        outputs: the number of logits; the first one is of "nothing".
        width: channels of the decoder.
    """

    def __init__(self, encoder: PictureEncoder, outputs: int, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.surroundings = AtrousPyramid(encoder.channels[-1], width, _RATES)
        self.pyramid = FeaturePyramid((*encoder.channels[:-1], width), width)
        self.head = nn.Sequential(convolution(width, width), nn.Conv2d(width, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, outputs, h / 4, w / 4) for pictures (n, 3, h, w)."""
        features = self.encoder(x)
        features[-1] = self.surroundings(features[-1])
        logits: Tensor = self.head(self.pyramid(features))
        return logits
