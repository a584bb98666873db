"""A small residual network for pictures, the encoder of our networks.

The stem halves the resolution twice. Each of four stages has residual blocks of two 3x3 convolutions; each stage but
the first halves the resolution again.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385, with the
deeper stem of He et al. 2019, arXiv:1812.01187.
"""

import torch
from torch import Tensor, nn

OUTPUTS = 4  # of a whole encoder


def convolution(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    """Return a convolution with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which averages where the block halves the resolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, stride)
        last = nn.BatchNorm2d(outputs)
        nn.init.zeros_(last.weight)  # a new block is the identity
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), last)
        steps: list[nn.Module] = [nn.AvgPool2d(2, ceil_mode=True)] if stride > 1 else []
        if inputs != outputs:
            steps += [nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.shortcut = nn.Sequential(*steps)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, (n, outputs, h / stride, w / stride)."""
        found: Tensor = self.activation(self.second(self.first(x)) + self.shortcut(x))
        return found


class PictureEncoder(nn.Module):
    """A network that returns features of pictures at 1/4, 1/8, 1/16 and 1/32 of their resolution, or the first of them.

    Attributes:
        channels: the channels of each output.
        stem: what comes before the stages.
        stages: its stages; an encoder that returns fewer features has no stages beyond them.
        last_stages: the number of the stage that each output is of.
    """

    channels: tuple[int, ...]
    stem: nn.Sequential
    stages: nn.ModuleList
    last_stages: tuple[int, ...]


class ResidualEncoder(PictureEncoder):
    """A residual network as an encoder.

    Args:
        width: channels of the first stage; each later stage has twice as many.
        blocks: residual blocks of each stage.
        outputs: the number of stages, each of which is an output.
    """

    def __init__(self, width: int, blocks: int, outputs: int = OUTPUTS) -> None:
        super().__init__()
        self.channels = tuple(width << stage for stage in range(outputs))
        self.last_stages = tuple(range(outputs))
        self.stem = nn.Sequential(convolution(3, width // 2, 2), convolution(width // 2, width), nn.MaxPool2d(2))
        stages: list[nn.Module] = []
        inputs = width
        for number, own in enumerate(self.channels):
            rest = [ResidualBlock(own, own, 1) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(ResidualBlock(inputs, own, 2 if number else 1), *rest))
            inputs = own
        self.stages = nn.ModuleList(stages)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the stages' outputs, at 1/4, 1/8, ... of the resolution of x, (n, 3, h, w)."""
        found = []
        # On a CPU, a training takes a fifth less time in this order of the memory.
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class PictureClassifier(nn.Module):
    """A network that returns one logit for each class of a picture.

    Args:
        encoder: returns features of pictures, the last ones of the lowest resolution; has `channels`.
        outputs: the number of logits.
        levels: 1: the head takes the means of the lowest resolution's features over the picture; 2 to 4: the means and
            the maxima of so many of the lowest resolutions.
    """

    def __init__(self, encoder: PictureEncoder, outputs: int, levels: int = 1) -> None:
        super().__init__()
        self.encoder = encoder
        self.levels = levels
        channels = encoder.channels[-levels:]
        self.head = nn.Linear(sum(channels) * (1 if levels == 1 else 2), outputs)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        """Return what the head takes, (n, features), for pictures (n, 3, h, w); first the last features' means."""
        maps: list[Tensor] = self.encoder(x)[: -1 - self.levels : -1]
        if self.levels == 1:
            return maps[0].mean((2, 3))
        return torch.cat([each for one in maps for each in (one.mean((2, 3)), one.amax((2, 3)))], 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, outputs) for pictures (n, 3, h, w)."""
        logits: Tensor = self.head(self.features(x))
        return logits
