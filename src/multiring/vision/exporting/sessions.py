"""Run an exported model with onnxruntime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.readers.limits import library
from multiring.errors import DataError
from multiring.vision.exporting.exported_files import ExportedModel, ModelTensor, read_exported

Arrays = dict[str, NDArray[Any]]
_ONNX_TYPES = {
    "tensor(bool)": "bool",
    "tensor(double)": "float64",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    **{f"tensor({name})": name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}


class ExportedSession:
    """An exported model in onnxruntime, on the CPU. Several threads may call it.

    Attributes:
        model: what its JSON file states.
    """

    def __init__(self, graph: bytes, model: ExportedModel, *, threads: int = 0, name: str = "") -> None:
        """Load a graph.

        Args:
            graph: the bytes of the ONNX file.
            model: what its JSON file states.
            threads: threads of one call. 0: as many as the machine has cores.
            name: the file's name for error messages.

        Raises:
            DataError: onnxruntime cannot load the graph, or its inputs and outputs are not those of `model`.
        """
        self._session = _loaded(graph, threads, name or "the graph")
        self.model = model
        self._outputs = [each.name for each in model.outputs]
        found = (_tensors(self._session.get_inputs()), _tensors(self._session.get_outputs()))
        if found != (model.inputs, model.outputs):
            raise DataError(f"{name or 'the graph'}: its inputs and outputs are not those that its JSON file states")

    @classmethod
    def open(cls, path: Path, *, threads: int = 0) -> "ExportedSession":
        """Load an exported model from its files.

        Raises:
            DataError: as of `read_exported` and of the class.
        """
        graph, model = read_exported(path)
        return cls(graph, model, threads=threads, name=repr(str(path)))

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return the outputs by name.

        Raises:
            DataError: onnxruntime refuses the inputs, for example sizes that do not fit each other.
        """
        try:
            found = self._session.run(self._outputs, dict(inputs))
        except Exception as error:  # as above
            raise DataError(f"the model cannot run on these inputs: {str(error)[:300]}") from error
        return {name: np.asarray(value) for name, value in zip(self._outputs, found, strict=True)}


def graph_tensors(graph: bytes) -> tuple[tuple[ModelTensor, ...], tuple[ModelTensor, ...]]:
    """Return the inputs and outputs of an ONNX file.

    Raises:
        DataError: onnxruntime cannot load the graph, or a tensor has a type that is not served, such as text.
    """
    session = _loaded(graph, 1, "the graph")
    return _tensors(session.get_inputs()), _tensors(session.get_outputs())


def _loaded(graph: bytes, threads: int, name: str) -> Any:
    runtime: Any = library("onnxruntime", "vision")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that wait for the next call by spinning take the cores of the threads that decode pictures.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    try:
        return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of its own for each kind of failure
        text = str(error).partition("\n")[0][:300]
        raise DataError(f"{name}: onnxruntime cannot load it: {text}") from error


def _tensors(arguments: Sequence[Any]) -> tuple[ModelTensor, ...]:
    found = []
    for each in arguments:
        if each.type not in _ONNX_TYPES:
            raise DataError(f"tensor {each.name!r} is a {each.type}: want one of {', '.join(sorted(_ONNX_TYPES))}")
        shape = tuple(size if isinstance(size, int) else None for size in each.shape)
        found.append(ModelTensor(name=each.name, dtype=_ONNX_TYPES[each.type], shape=shape))
    return tuple(found)
