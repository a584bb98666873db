"""ResNets of bottlenecks, v1.5, with any number of channels and classes, also as encoders of segmentation networks.

v1.5 halves the resolution in a block's 3x3 convolution, not in its first 1x1 convolution. Parameters have the names of
torchvision's ResNet, so that its weights load.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

LAYERS = {"resnet26": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
EXPANSION = 4


class Bottleneck(nn.Module):
    """A block of 1x1, 3x3 and 1x1 convolutions beside a shortcut, with EXPANSION x width channels."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=dilation, dilation=dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: (n, EXPANSION * width, h / stride, w / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = torch.relu_(self.bn1(self.conv1(x)))
        x = torch.relu_(self.bn2(self.conv2(x)))
        return torch.relu_(self.bn3(self.conv3(x)).add_(shortcut))


class ResNet(nn.Module):
    """A ResNet of bottlenecks.

    Args:
        layers: the number of blocks of each of the four stages, as in LAYERS.
        classes: the number of outputs.
        channels: the number of channels of the input.
        width: channels of the first stage's 3x3 convolutions; 64 is the published network.
        small: use a 3x3 stem without pooling, for images of at most 64 pixels.
        output_stride: pixels of the input per pixel of the last stage. With 16 or 8 the last stages dilate their
            convolutions instead of halving the resolution.
    """

    def __init__(
        self,
        layers: Sequence[int],
        classes: int,
        channels: int = 3,
        width: int = 64,
        *,
        small: bool = False,
        output_stride: int = 32,
    ) -> None:
        super().__init__()
        if output_stride not in {8, 16, 32}:
            raise ValueError(f"output_stride={output_stride}: want 8, 16 or 32")
        self.small = small
        if small:
            self.conv1 = nn.Conv2d(channels, width, 3, 2, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        self._inputs = width
        dilated = {8: (1, 1, 2, 4), 16: (1, 1, 1, 2), 32: (1, 1, 1, 1)}[output_stride]
        self.layer1 = self._stage(layers[0], width, 1, dilated[0])
        self.layer2 = self._stage(layers[1], width * 2, 2, dilated[1])
        self.layer3 = self._stage(layers[2], width * 4, 2, dilated[2])
        self.layer4 = self._stage(layers[3], width * 8, 2, dilated[3])
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width * 8 * EXPANSION, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(self, blocks: int, width: int, stride: int, dilation: int) -> nn.Sequential:
        """Return a stage; if its dilation is larger than the stage before's, it keeps the resolution."""
        first = Bottleneck(self._inputs, width, 1 if dilation > 1 else stride, max(1, dilation // 2))
        self._inputs = width * EXPANSION
        return nn.Sequential(first, *(Bottleneck(self._inputs, width, 1, dilation) for _ in range(blocks - 1)))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the first stage, at a quarter of the resolution, and of the last stage."""
        x = self.maxpool(torch.relu_(self.bn1(self.conv1(x))))
        early = self.layer1(x)
        return early, self.layer4(self.layer3(self.layer2(early)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes, (n, classes), for images (n, channels, height, width)."""
        _, x = self.features(x)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def zero_last_gammas(model: nn.Module) -> None:
    """Initialize each residual block as the identity (Goyal et al. 2017, arXiv:1706.02677, section 5.1)."""
    for module in model.modules():
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
