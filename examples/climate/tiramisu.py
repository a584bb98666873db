"""Tiramisu: a fully convolutional DenseNet, with fewer and wider layers than the published one.

It has blocks of 2, 2, 2, 4 and 5 layers of 5x5 convolutions, each of which adds 32 channels. Kurth et al. changed it
this way for climate fields, to have fewer layers with more arithmetic in each.

Sources: Jegou et al., "The One Hundred Layers Tiramisu", CVPR workshops 2017, arXiv:1611.09326;
Kurth et al., "Exascale Deep Learning for Climate Analytics", SC18, arXiv:1810.01993.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

BLOCKS = (2, 2, 2, 4, 5)


class DenseBlock(nn.Module):
    """Layers that each read the outputs of all earlier ones. It returns their outputs, and its input if `keeps`."""

    def __init__(self, inputs: int, layers: int, growth: int, size: int, *, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + growth * i),
                nn.ReLU(inplace=True),
                nn.Conv2d(inputs + growth * i, growth, size, padding=size // 2, bias=False),
            )
            for i in range(layers)
        )
        self.outputs = growth * layers + inputs * keeps

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, outputs, h, w) for (n, inputs, h, w)."""
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return torch.cat(made if self.keeps else made[1:], 1)


class Tiramisu(nn.Module):
    """A network that returns logits (n, classes, h, w) for fields (n, channels, h, w); h and w are multiples of 16.

    Args:
        channels: the number of channels of a field.
        classes: the number of classes of a pixel.
        growth: the number of channels that a layer adds.
        size: the size of the layers' convolutions.
        first: the number of channels of the first convolution.
        blocks: the number of layers of each block, down to the lowest resolution; the way up mirrors it.
    """

    def __init__(
        self,
        channels: int = 16,
        classes: int = 3,
        growth: int = 32,
        size: int = 5,
        first: int = 64,
        blocks: Sequence[int] = BLOCKS,
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, first, 3, padding=1, bias=False)
        self.down_blocks, self.halvings, skipped, width = nn.ModuleList(), nn.ModuleList(), [], first
        for layers in blocks[:-1]:
            block = DenseBlock(width, layers, growth, size, keeps=True)
            width = block.outputs
            self.down_blocks.append(block)
            skipped.append(width)
            self.halvings.append(
                nn.Sequential(
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, width, 1, bias=False),
                    nn.MaxPool2d(2),
                )
            )
        self.lowest = DenseBlock(width, blocks[-1], growth, size, keeps=False)
        width = self.lowest.outputs
        self.doublings, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        for number, (layers, skip) in enumerate(zip(blocks[-2::-1], reversed(skipped), strict=True)):
            self.doublings.append(nn.ConvTranspose2d(width, width, 3, 2, padding=1, output_padding=1, bias=False))
            block = DenseBlock(width + skip, layers, growth, size, keeps=number == len(blocks) - 2)
            width = block.outputs
            self.up_blocks.append(block)
        self.classify = nn.Conv2d(width, classes, 1)
        self._divisor = 2 ** (len(blocks) - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes of every pixel."""
        if x.shape[2] % self._divisor or x.shape[3] % self._divisor:
            raise ValueError(
                f"fields of {x.shape[2]} x {x.shape[3]} pixels: want height and width in multiples of {self._divisor}"
            )
        x = self.first(x)
        skipped = []
        for block, halve in zip(self.down_blocks, self.halvings, strict=True):
            x = block(x)
            skipped.append(x)
            x = halve(x)
        x = self.lowest(x)
        for double, block in zip(self.doublings, self.up_blocks, strict=True):
            x = block(torch.cat([double(x), skipped.pop()], 1))
        logits: Tensor = self.classify(x)
        return logits
