"""The layers of known models, in the order of the forward pass: their parameters and multiplications.

Sources: ResNets, He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1, with the stride in the
3x3 convolutions as in Goyal et al., arXiv 1706.02677; VGG-16, Simonyan & Zisserman, ICLR 2015, table 1, column D.
DeepLabv3+, Kurth et al., "Exascale Deep Learning for Climate Analytics", SC18, arXiv 1810.01993, for fields of 768 x
1152 x 16, with the layers of its program without batch norms (climate-seg-benchmark at 1bca349,
deeplab-tf/deeplab_model.py, decoder deconv1x). Its log counts 43,669,251 parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from multiring.errors import ArgumentError
from multiring.planner.parallelism import Unit

_CLASSES = 1000
_BYTES = 4  # of a float32
_IMAGE = 224  # pixels a side


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: the elements of each of its parameters, and the multiplications for one sample in forward."""

    name: str
    parameters: tuple[int, ...]
    multiplications: int
    outputs: int  # elements for one sample


class _Layers:
    """Collects layers; `side` is the height and width of the present feature map, `width` its channels."""

    def __init__(self) -> None:
        self.found: list[Layer] = []
        self.side, self.width = _IMAGE, 3

    def convolve(self, width: int, kernel: int, stride: int = 1, *, of: tuple[int, int] | None = None) -> None:
        """Add a convolution with batch normalization; `of` is its input (side, width), by default the present map."""
        side, width_in = of or (self.side, self.width)
        out = -(-side // stride)
        weights = width_in * width * kernel * kernel
        name = f"convolution {len(self.found)}"
        self.found.append(Layer(name, (weights, width, width), weights * out * out, out * out * width))
        self.side, self.width = out, width

    def convolve_with_bias(self, width: int) -> None:
        weights = self.width * width * 9
        area = self.side * self.side
        self.found.append(Layer(f"convolution {len(self.found)}", (weights, width), weights * area, area * width))
        self.width = width

    def connect(self, inputs: int, outputs: int) -> None:
        name = f"linear {len(self.found)}"
        self.found.append(Layer(name, (inputs * outputs, outputs), inputs * outputs, outputs))


def _resnet(blocks: tuple[int, ...]) -> list[Layer]:
    layers = _Layers()
    layers.convolve(64, 7, 2)
    layers.side //= 2  # the pooling
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            before = layers.side, layers.width
            layers.convolve(width, 1)
            layers.convolve(width, 3, stride)
            layers.convolve(4 * width, 1)
            if not block:
                layers.convolve(4 * width, 1, stride, of=before)
    layers.connect(layers.width, _CLASSES)
    return layers.found


def _vgg16() -> list[Layer]:
    layers = _Layers()
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers.convolve_with_bias(width)
        layers.side //= 2  # the pooling
    layers.connect(layers.side * layers.side * layers.width, 4096)
    layers.connect(4096, 4096)
    layers.connect(4096, _CLASSES)
    return layers.found


class _Fields:
    """Collects the layers of DeepLabv3+; a convolution has no normalization, and a bias only where one is named."""

    def __init__(self) -> None:
        self.found: list[Layer] = []

    def convolve(self, width_in: int, width: int, kernel: int, area: int, *, bias: bool = False, up: int = 1) -> None:
        """Add a convolution with outputs of `area` pixels, or a transposed one that has `up` times its input's."""
        weights = width_in * width * kernel * kernel
        parameters = (weights, width) if bias else (weights,)
        name = f"convolution {len(self.found)}"
        self.found.append(Layer(name, parameters, weights * area // up, area * width))

    def bottleneck(self, width_in: int, width: int, area_in: int, area: int, *, projected: bool) -> None:
        """Add a unit of the ResNet's second version, whose stride is in its 3x3 convolution."""
        if projected:
            self.convolve(width_in, 4 * width, 1, area, bias=True)
        self.convolve(width_in, width, 1, area_in)
        self.convolve(width, width, 3, area)
        self.convolve(width, 4 * width, 1, area, bias=True)


def _deeplabv3plus() -> list[Layer]:
    layers, full = _Fields(), 768 * 1152
    half, quarter, eighth = full // 4, full // 16, full // 64
    layers.convolve(16, 64, 7, half, bias=True)
    width_in = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for unit in range(count):
            # The last unit of the first stage has the stride that leads to an eighth of the resolution.
            area_in = eighth if stage else quarter
            area = eighth if stage or unit == count - 1 else quarter
            layers.bottleneck(width_in, width, area_in, area, projected=not unit)
            width_in = 4 * width
    layers.convolve(2048, 256, 1, eighth)
    for _ in range(3):
        layers.convolve(2048, 256, 3, eighth)
    layers.convolve(2048, 256, 1, 1)  # the mean of the image
    layers.convolve(5 * 256, 256, 1, eighth)
    layers.convolve(64, 48, 1, quarter)
    layers.convolve(256, 256, 3, quarter, bias=True, up=4)
    layers.convolve(256 + 48, 256, 3, quarter)
    layers.convolve(256, 256, 3, quarter)
    layers.convolve(256, 256, 3, half, bias=True, up=4)
    layers.convolve(256, 256, 3, full, bias=True, up=4)
    layers.convolve(16, 64, 3, full, bias=True)
    layers.convolve(64, 128, 3, full, bias=True)
    layers.convolve(256 + 128, 256, 3, full, bias=True)
    layers.convolve(256, 256, 3, full, bias=True)
    layers.convolve(256, 3, 1, full, bias=True)
    return layers.found


_MODELS: Mapping[str, Callable[[], list[Layer]]] = MappingProxyType(
    {
        "deeplabv3plus": _deeplabv3plus,
        "resnet50": partial(_resnet, (3, 4, 6, 3)),
        "resnet101": partial(_resnet, (3, 4, 23, 3)),
        "resnet152": partial(_resnet, (3, 8, 36, 3)),
        "vgg16": _vgg16,
    }
)


def model_names() -> list[str]:
    """Return the names of the known models, sorted."""
    return sorted(_MODELS)


def layers_of(model: str) -> list[Layer]:
    """Return the layers of a known model.

    Raises:
        ArgumentError: the model is unknown.
    """
    if model not in _MODELS:
        raise ArgumentError(f"no model {model!r}: want one of {', '.join(model_names())}")
    return _MODELS[model]()


def units_of(layers: list[Layer], gradient_bytes: int = _BYTES) -> tuple[Unit, ...]:
    """Return the layers as units of a profile; their seconds are in proportion to their multiplications.

    A gradient of one element has `gradient_bytes`.
    """
    return tuple(
        Unit(
            name=layer.name,
            parameters=len(layer.parameters),
            parameter_bytes=gradient_bytes * sum(layer.parameters),
            seconds=float(layer.multiplications),
            output_bytes=_BYTES * layer.outputs,
            saved_bytes=_BYTES * layer.outputs,
        )
        for layer in layers
    )
