"""Export a user's own torch module, and compare the file's answers with the module's."""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multiring.errors import ArgumentError, DataError
from multiring.vision.exporting.exported_files import ExportedModel, digest_of, require_export_place, write_exported
from multiring.vision.exporting.graphs import exported_graph, named_outputs
from multiring.vision.exporting.sessions import ExportedSession, graph_tensors

Samples = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor
_EQUAL_SHARE = 0.999  # of the integers of an output
_BATCHES = (1, 2, 3, 7)


def export_module(
    module: torch.nn.Module,
    samples: Samples,
    path: Path,
    *,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    tolerance: float = 1e-4,
) -> ExportedModel:
    """Write a module as an ONNX file, if onnxruntime answers as the module does.

    The file is compared on the samples, on batches of 1, 2, 3 and 7 made of their rows, and on other sizes of the
    other dynamic dimensions. The module is put into evaluation mode meanwhile.

    Args:
        module: the module. Its forward takes the samples, and returns a tensor, or a dict or tuple of tensors.
        samples: a tensor for each input: by name, or in the order of forward's parameters. Their first dimension is
            the batch, of the same size for all.
        path: the file to write, such as model.onnx. Beside it, model.onnx.json is written.
        dynamic: the dimensions of each input that may have any size. Default: the batch, dimension 0, of each.
        tolerance: the largest allowed difference of a number, relative to the largest number of the output, or 1.

    Raises:
        ArgumentError: the samples are malformed, a file that is no export is at `path`, or its folder does not exist.
        DataError: the module cannot be exported, its answers have no finite number, or answers differ. Nothing was
            written.
    """
    named = _named_samples(module, samples)
    chosen = _dynamic(named, dynamic)
    require_export_place(path)
    # Each part has its own state: a part that is frozen stays so.
    were_training = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        expected = _outputs(module, named)
        again = _outputs(module, named)
        for name, value in expected.items():
            if not np.array_equal(value, again[name], equal_nan=True):
                raise DataError(f"output {name!r} differs between two calls with the same samples: want a module "
                                "without randomness in evaluation mode")  # fmt: skip
        traced = {name: _resized(value, dict.fromkeys(chosen[name], 2), at_least=True) for name, value in named.items()}
        graph = exported_graph(module, traced, chosen, list(expected))
        inputs, outputs = graph_tensors(graph)
        made = ExportedModel(kind="module", digest=digest_of(graph), inputs=inputs, outputs=outputs)
        figures = _compared(module, ExportedSession(graph, made), _cases(named, chosen), tolerance)
    finally:
        for each, was_training in were_training:
            each.training = was_training
    made = replace(made, parity=figures)
    write_exported(path, graph, made)
    return made


def _named_samples(module: torch.nn.Module, samples: Samples) -> dict[str, torch.Tensor]:
    if isinstance(samples, torch.Tensor):
        samples = (samples,)
    if not isinstance(samples, Mapping):
        parameters = list(inspect.signature(module.forward).parameters)
        if len(samples) > len(parameters):
            raise ArgumentError(f"{len(samples)} samples: forward takes {len(parameters)}, {', '.join(parameters)}")
        samples = dict(zip(parameters, samples, strict=False))
    for name, value in samples.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"sample {name!r} is a {type(value).__name__}: want a tensor")
        if not value.dim() or not value.numel():
            raise ArgumentError(f"sample {name!r} has the shape {list(value.shape)}: want at least one row")
    if not samples:
        raise ArgumentError("no samples: want a tensor for each input of forward")
    batches = {name: len(value) for name, value in samples.items()}
    if len(set(batches.values())) > 1:
        raise ArgumentError(f"the samples have batches of {batches}: want the same first dimension for all")
    return dict(samples)


def _dynamic(
    samples: Mapping[str, torch.Tensor], dynamic: Mapping[str, Sequence[int]] | None
) -> dict[str, tuple[int, ...]]:
    for name, dims in (dynamic or {}).items():
        if name not in samples:
            raise ArgumentError(f"dynamic dimensions of {name!r}: want one of the inputs, {', '.join(samples)}")
        if bad := [dim for dim in dims if not 0 <= dim < samples[name].dim()]:
            raise ArgumentError(f"dynamic dimension {bad[0]} of {name!r}: want 0 to {samples[name].dim() - 1}")
    return {name: tuple(sorted({0, *(dynamic or {}).get(name, ())})) for name in samples}


def _resized(value: torch.Tensor, sizes: Mapping[int, int], *, at_least: bool = False) -> torch.Tensor:
    """Return a tensor of other sizes. A dimension that grows repeats its values."""
    for dim, size in sizes.items():
        if at_least and value.shape[dim] >= size:
            continue
        value = value.index_select(dim, torch.arange(size) % value.shape[dim])
    return value.contiguous()


def _cases(samples: Mapping[str, torch.Tensor], dynamic: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield the samples, other batches, and other sizes of one dynamic dimension at a time."""
    yield dict(samples)
    for batch in _BATCHES:
        yield {name: _resized(value, {0: batch}) for name, value in samples.items()}
    # Dimensions of the same number and size change together: a mask has the length of its text.
    sizes = {(dim, samples[name].shape[dim]) for name, dims in dynamic.items() for dim in dims if dim}
    for (dim, size), change in itertools.product(sorted(sizes), (lambda n: n + 1, lambda n: 2 * n + 3)):
        yield {
            name: _resized(value, {dim: change(size)}) if dim in dynamic[name] and value.shape[dim] == size else value
            for name, value in samples.items()
        }


def _outputs(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    with torch.no_grad():
        found = named_outputs(module(*inputs.values()))
    return {name: value.detach().cpu().numpy() for name, value in found.items()}


def _compared(
    module: torch.nn.Module, session: ExportedSession, cases: Iterable[Mapping[str, torch.Tensor]], tolerance: float
) -> dict[str, Any]:
    """Return the figures of a comparison. Raise DataError if an answer differs."""
    largest, share, compared = 0.0, 1.0, 0
    for case in cases:
        compared += 1
        expected = _outputs(module, case)
        found = session.run({name: value.cpu().numpy() for name, value in case.items()})
        shapes = {name: list(value.shape) for name, value in case.items()}
        for name, value in expected.items():
            got = found[name]
            if got.shape != value.shape or got.dtype != value.dtype:
                raise DataError(
                    f"output {name!r} for inputs of {shapes}: onnxruntime returns {got.dtype} {list(got.shape)}, the "
                    f"module {value.dtype} {list(value.shape)}; nothing was written"
                )
            if np.issubdtype(value.dtype, np.floating):
                if value.size and not np.isfinite(value).any():
                    raise DataError(
                        f"output {name!r} for inputs of {shapes} has no finite number, so nothing can be compared: "
                        "want samples for which the module gives numbers; nothing was written"
                    )
                difference = _difference(value, got)
                largest = max(largest, difference)
                is_alike = difference <= tolerance  # False for NaN
            else:
                same = float((value == got).mean()) if value.size else 1.0
                share, difference = min(share, same), 1 - same
                is_alike = same >= _EQUAL_SHARE
            if not is_alike:
                raise DataError(
                    f"output {name!r} for inputs of {shapes}: onnxruntime's answer differs from the module's by "
                    f"{difference:.3g}: want at most {tolerance:g} of the largest number, and "
                    f"{_EQUAL_SHARE:.1%} of integers equal; nothing was written"
                )
    return {"cases": compared, "largest_difference": largest, "equal_integers": share, "tolerance": tolerance}


def _difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Return the largest difference, relative to the largest expected number or 1; infinite if NaNs differ."""
    if not expected.size:
        return 0.0
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], found[~finite], equal_nan=True):
        return float("inf")
    wide, got = expected[finite].astype(np.float64), found[finite].astype(np.float64)
    return float(np.abs(wide - got).max() / max(1.0, float(np.abs(wide).max())))
