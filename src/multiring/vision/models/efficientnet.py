"""EfficientNet-Lite0 as an encoder: inverted residual blocks without squeeze-and-excitation, and ReLU6.

Sources: Tan, Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019,
arXiv:1905.11946; the Lite variants of the TensorFlow authors, github.com/tensorflow/tpu, models/official/efficientnet.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from multiring.vision.models.residual import OUTPUTS, PictureEncoder

# The stages: size of the depthwise kernels, stride, factor of the expansion, channels of the output, blocks.
_STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
BLOCKS = tuple(blocks for *_, blocks in _STAGES)  # of each stage
_LAST_OF_RESOLUTION = (1, 2, 4, 6)  # the last stages at 1/4, 1/8, 1/16 and 1/32 of the resolution; OUTPUTS of them
_STEM, _TOP = 32, 1280  # channels
_EPSILON = 1e-3  # of batch norms, as the pretrained weights had it


class SameConvolution(nn.Conv2d):
    """A convolution whose output has 1/stride of the input's height and width, rounded up.

    Padding is as TensorFlow's: if it is odd, the right and the lower side have one pixel more. Pretrained weights
    depend on it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of x, (n, channels, h, w)."""
        down = _padding(x.shape[2], self.kernel_size[0], self.stride[0])
        across = _padding(x.shape[3], self.kernel_size[1], self.stride[1])
        return super().forward(pad(x, [across // 2, across - across // 2, down // 2, down - down // 2]))


def _padding(length: int, kernel: int, stride: int) -> int:
    return max((-(-length // stride) - 1) * stride + kernel - length, 0)


def _layer(inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = SameConvolution(inputs, outputs, size, stride, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs, eps=_EPSILON)]


class InvertedResidual(nn.Module):
    """A 1x1 convolution to more channels, a convolution of each channel by itself, and a 1x1 convolution to fewer.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        size: of the kernels of the convolution of each channel.
        stride: the factor by which the block lowers the resolution.
        factor: how many times as many channels are between the 1x1 convolutions; 1 leaves the first one out.
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = inputs * factor
        expand = [*_layer(inputs, wide), nn.ReLU6(inplace=True)] if factor > 1 else []
        self.expand = nn.Sequential(*expand)
        self.depthwise = nn.Sequential(*_layer(wide, wide, size, stride, wide), nn.ReLU6(inplace=True))
        self.project = nn.Sequential(*_layer(wide, outputs))
        self._has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, (n, outputs, h / stride, w / stride)."""
        found: Tensor = self.project(self.depthwise(self.expand(x)))
        return found + x if self._has_shortcut else found


class EfficientNetLite0(PictureEncoder):
    """EfficientNet-Lite0 as an encoder.

    Args:
        has_top: the features of the lowest resolution go through the 1x1 convolution to 1280 channels that precedes
            the classes of the original.
        outputs: how many features it returns; it has no stages beyond the last of them.
    """

    def __init__(self, *, has_top: bool, outputs: int = OUTPUTS) -> None:
        super().__init__()
        self.last_stages = _LAST_OF_RESOLUTION[:outputs]
        widths = [_STAGES[number][3] for number in self.last_stages]
        self.channels = (*widths[:-1], _TOP if has_top else widths[-1])
        self.stem = nn.Sequential(*_layer(3, _STEM, 3, 2), nn.ReLU6(inplace=True))
        stages: list[nn.Module] = []
        inputs = _STEM
        for size, stride, factor, own, blocks in _STAGES[: 1 + self.last_stages[-1]]:
            first = InvertedResidual(inputs, own, size, stride, factor)
            rest = [InvertedResidual(own, own, size, 1, factor) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(first, *rest))
            inputs = own
        self.stages = nn.ModuleList(stages)
        top = [*_layer(inputs, _TOP), nn.ReLU6(inplace=True)] if has_top else []
        self.top = nn.Sequential(*top)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return features at 1/4, 1/8, ... of the resolution of x, (n, 3, h, w)."""
        found = []
        # On a CPU, convolutions of single channels are half as fast again in this order of the memory.
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number in self.last_stages:
                found.append(x)
        found[-1] = self.top(found[-1])
        return found
