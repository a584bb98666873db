"""The networks of the timed training steps: layers with random weights, without downloads."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_CLASSES = 1000
_TABLES, _ROWS, _WIDTH = 8, 100_000, 32
_WORDS, _CONTEXT, _FEATURES, _HEADS, _BLOCKS = 8192, 128, 768, 12, 12


@dataclass(frozen=True, slots=True)
class NetworkFactory:
    """The constructors of a network and of a rank's batch.

    `samples(batch, image_size)` returns inputs and targets. `memory_format` applies to parameters and images. `units`
    returns the modules of a model that fully_shard shards separately.
    """

    make: Callable[[], nn.Module]
    samples: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    memory_format: torch.memory_format
    units: Callable[[nn.Module], list[nn.Module]] = lambda _: []


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside a shortcut.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, figure 5. The stride is in the 3x3
    convolution, as in Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677, section 5.1.
    """

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        width_out = 4 * width
        self.body = nn.Sequential(
            *_convolution(width_in, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, width_out, 1),
        )
        is_same = stride == 1 and width_in == width_out
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolution(width_in, width_out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output.

        Shape (batch, 4 * width, height / stride, width / stride).
        """
        return torch.relu_(self.body(x) + self.shortcut(x))


def _convolution(width_in: int, width_out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(width_in, width_out, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(width_out)


def resnet50() -> nn.Module:
    """Return ResNet-50 (He et al., CVPR 2016, table 1): 25 557 032 parameters."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    width_in = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(width_in, width, 2 if stage and not block else 1))
            width_in = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, _CLASSES)]
    return _scaled(nn.Sequential(*layers))


def vgg16() -> nn.Module:
    """Return VGG-16 (Simonyan & Zisserman, ICLR 2015, table 1, column D): 138 357 544 parameters."""
    layers: list[nn.Module] = []
    width_in = 3
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.ReLU(inplace=True)]
            width_in = width
        layers.append(nn.MaxPool2d(2))
    # Images of any size are pooled to 7x7, the size for images of 224 pixels.
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for features_in, features_out in ((512 * 7 * 7, 4096), (4096, 4096)):
        layers += [nn.Linear(features_in, features_out), nn.ReLU(inplace=True), nn.Dropout()]
    layers.append(nn.Linear(4096, _CLASSES))
    return _scaled(nn.Sequential(*layers))


def _scaled(model: nn.Module) -> nn.Module:
    """Initialize convolutions such that activations keep their size through many layers.

    Source: He et al., "Delving Deep into Rectifiers", ICCV 2015, section 2.2.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Recommender(nn.Module):
    """Embedding tables and a small head: 25.6 million parameters, nearly all of them in the tables.

    It has about as many gradient bytes as ResNet-50, with almost no arithmetic to hide them. Gradients are dense.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(_ROWS, _WIDTH) for _ in range(_TABLES))
        self.head = nn.Sequential(nn.Linear(_TABLES * _WIDTH, 128), nn.ReLU(inplace=True), nn.Linear(128, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per sample, shape (batch,), for row numbers `x` of shape (batch, tables)."""
        looked_up = torch.cat([table(x[:, place]) for place, table in enumerate(self.tables)], dim=1)
        logits: Tensor = self.head(looked_up).squeeze(1)
        return logits


class Block(nn.Module):
    """A block of a causal transformer, with layer norms before the attention and before the head.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_FEATURES)
        self.query_key_value = nn.Linear(_FEATURES, 3 * _FEATURES)
        self.attended = nn.Linear(_FEATURES, _FEATURES)
        self.head_norm = nn.LayerNorm(_FEATURES)
        self.head = nn.Sequential(nn.Linear(_FEATURES, 4 * _FEATURES), nn.GELU(), nn.Linear(4 * _FEATURES, _FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the input's shape (batch, words, features)."""
        batch, words, _ = x.shape
        parts = self.query_key_value(self.attention_norm(x)).view(batch, words, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).reshape(x.shape))
        found: Tensor = x + self.head(self.head_norm(x))
        return found


class Transformer(nn.Module):
    """A language model like the smallest GPT-2, with a smaller vocabulary: 97 737 216 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _FEATURES)
        self.places = nn.Embedding(_CONTEXT, _FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_FEATURES)
        self.next = nn.Linear(_FEATURES, _WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the next word, shape (batch, vocabulary, words), for `x` of shape (batch, words)."""
        x = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.next(self.norm(x))
        return logits.transpose(1, 2)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _images(batch: int, image_size: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, image_size, image_size).to(memory_format=torch.channels_last)
    return images, torch.randint(_CLASSES, (batch,))


def _clicks(batch: int, _image_size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(_ROWS, (batch, _TABLES)), torch.randint(2, (batch,)).float()


def _texts(batch: int, _image_size: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(_WORDS, (batch, _CONTEXT + 1))
    return words[:, :-1], words[:, 1:]


_CROSS_ENTROPY = nn.functional.cross_entropy
NETWORKS = {
    "resnet50": NetworkFactory(resnet50, _images, _CROSS_ENTROPY, torch.channels_last),
    "vgg16": NetworkFactory(vgg16, _images, _CROSS_ENTROPY, torch.channels_last),
    "embedding": NetworkFactory(
        Recommender, _clicks, nn.functional.binary_cross_entropy_with_logits, torch.contiguous_format
    ),
    "transformer": NetworkFactory(Transformer, _texts, _CROSS_ENTROPY, torch.contiguous_format, _blocks),
}
