"""Turn a torch module into an ONNX graph with torch.export."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from multiring.data.readers.limits import library
from multiring.errors import DataError
from multiring.vision.exporting.exported_files import MARK

# Operators of 2023 and files of 2024: releases of onnxruntime from 1.20 on, of November 2024, run these.
_OPSET, _FILE_VERSION = 18, 10


def exported_graph(
    module: torch.nn.Module,
    samples: Mapping[str, torch.Tensor],
    dynamic: Mapping[str, Sequence[int]],
    outputs: Sequence[str],
) -> bytes:
    """Return an ONNX file of a module in evaluation mode.

    Args:
        module: the module. Its forward takes the samples, in their order.
        samples: an input of each name. A dynamic dimension needs a size of at least 2.
        dynamic: the dimensions of each input that may have any size.
        outputs: the names of the outputs, in the order in which forward returns them.

    Raises:
        DataError: torch.export or the ONNX exporter does not support the module; the text has its reason.
    """
    onnx: Any = library("onnx", "vision")
    library("onnxscript", "vision")
    shapes = {name: dict.fromkeys(dynamic.get(name, ()), torch.export.Dim.DYNAMIC) for name in samples}
    positional = _Positional(module)
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                positional,
                tuple(samples.values()),
                dynamo=True,
                input_names=list(samples),
                output_names=list(outputs),
                dynamic_shapes=(tuple(shapes.values()),),
                opset_version=_OPSET,
                external_data=False,
                verbose=False,
            )
            made = program.model_proto
    except Exception as error:  # the exporter's classes say nothing beyond their text
        cause = error.__cause__ or error
        text = " ".join(str(cause).split())[:500]
        raise DataError(f"the module cannot be exported: {type(cause).__name__}: {text}") from error
    made.ir_version = min(made.ir_version, _FILE_VERSION)
    # The exporter's notes name files and lines of the machine that exported.
    for each in (made.graph, *made.graph.node, *made.graph.input, *made.graph.output, *made.graph.initializer,
                 *made.graph.value_info, *made.functions, made):  # fmt: skip
        del each.metadata_props[:]
    made.metadata_props.add(key="made_by", value=MARK)
    onnx.checker.check_model(made)
    data: bytes = made.SerializeToString(deterministic=True)
    return data


def named_outputs(found: object) -> dict[str, torch.Tensor]:
    """Return the tensors that a forward returned, by name.

    The names of a dict are its keys. A single tensor is "output"; those of a tuple are "output0", "output1", ...

    Raises:
        DataError: forward returned something else.
    """
    if isinstance(found, torch.Tensor):
        return {"output": found}
    named: Mapping[Any, Any] = {}
    if isinstance(found, Mapping):
        named = found
    elif isinstance(found, list | tuple):
        named = {f"output{number}": each for number, each in enumerate(found)}
    if not named or not all(isinstance(each, torch.Tensor) for each in named.values()):
        raise DataError(f"forward returned {type(found).__name__}: want a tensor, or a dict or tuple of tensors")
    return {str(name): each for name, each in named.items()}


class _Positional(torch.nn.Module):
    """Gives a module its inputs in order, and returns its outputs as a tuple in order."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(named_outputs(self.module(*inputs)).values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which warns and logs about itself. Failures are raised."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
