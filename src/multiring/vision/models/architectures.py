"""The networks by name: what `ModelDescription.architecture` and its arguments mean."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from multiring.errors import DataError
from multiring.vision.models.clip_classifier import ENCODER_OUTPUTS, ClipClassifier
from multiring.vision.models.description import ModelDescription
from multiring.vision.models.detector import CentrePointDetector
from multiring.vision.models.efficientnet import EfficientNetLite0
from multiring.vision.models.residual import OUTPUTS, PictureClassifier, PictureEncoder, ResidualEncoder
from multiring.vision.models.segmenter import PictureSegmenter

LITE0 = "efficientnet-lite0"
# The arguments of each encoder with their defaults.
ENCODERS: Mapping[str, Mapping[str, int]] = {"resnet": {"width": 32, "blocks": 2}, LITE0: {}}
# The additional arguments of each kind with their defaults.
HEADS: Mapping[str, Mapping[str, int]] = {
    "classify": {"levels": 1},
    "detect": {"head": 64},
    "segment": {"head": 64},
    "act": {"head": 64},
}
# The deviations of pictures that an encoder sees, for red, green and blue in 0 to 1. Pretrained weights depend on them.
DEVIATIONS: Mapping[str, float] = {"resnet": 0.25, LITE0: 0.5}
_MOST = 4096  # channels or blocks


def require_arguments(kind: str, architecture: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a network, with the defaults of those that are not given.

    Raises:
        DataError: there is no such network for the kind, or no such argument, or a value is out of its range.
    """
    if kind not in HEADS:
        raise DataError(f"kind {kind!r}: want one of {', '.join(HEADS)}")
    if architecture not in ENCODERS:
        raise DataError(f"architecture {architecture!r}: want one of {', '.join(ENCODERS)}")
    defaults = {**ENCODERS[architecture], **HEADS[kind]}
    for name, value in arguments.items():
        if name not in defaults:
            names = ", ".join(sorted(defaults)) or "none"
            raise DataError(f"{architecture} has no argument {name!r}: want one of {names}")
        wanted = type(defaults[name])
        most = OUTPUTS if name == "levels" else _MOST
        if type(value) is not wanted or not 1 <= value <= most:
            raise DataError(f"{architecture}: {name}={value!r}: want a whole number from 1 to {most}")
    return {**defaults, **arguments}


def build_network(description: ModelDescription) -> nn.Module:
    """Return a new network, with weights from torch's generator.

    Raises:
        DataError: as of `require_arguments`.
    """
    given = require_arguments(description.kind, description.architecture, description.arguments)
    encoder: PictureEncoder
    levels = ENCODER_OUTPUTS if description.kind == "act" else OUTPUTS
    if description.architecture == LITE0:
        # The top serves ImageNet's classes. Of another kind of picture, the features before it tell more.
        has_top = description.kind == "classify" and given["levels"] == 1
        encoder = EfficientNetLite0(has_top=has_top, outputs=levels)
    else:
        encoder = ResidualEncoder(given["width"], given["blocks"], levels)
    outputs = description.outputs
    if description.kind == "classify":
        return PictureClassifier(encoder, outputs, given["levels"])
    if description.kind == "detect":
        return CentrePointDetector(encoder, outputs, given["head"])
    if description.kind == "segment":
        return PictureSegmenter(encoder, 1 + outputs, given["head"])
    return ClipClassifier(encoder, outputs, given["head"])
