"""`multiring export`: a user's own torch module as an ONNX file that answers as the module does."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multiring._cli import main
from multiring.errors import ArgumentError, DataError
from multiring.vision.exporting import graphs, modules
from multiring.vision.exporting.exported_files import MARK, digest_of, read_exported, record_path, write_exported
from multiring.vision.exporting.modules import export_module
from multiring.vision.exporting.sessions import ExportedSession


class TwoInputs(torch.nn.Module):
    """Takes pixels of any size and a weight for each row; returns scores and the best class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, pixels: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs by name."""
        mean = pixels.float().mean((1, 2)) / 255
        scores = self.layer(self.dropout(mean)) * weights[:, None]
        return {"scores": scores, "best": scores.argmax(1)}


def samples() -> dict[str, torch.Tensor]:
    """Return inputs for TwoInputs."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (4, 5, 7, 3), generator=generator).to(torch.uint8)
    return {"pixels": pixels, "weights": torch.rand(4, generator=generator)}


def test_the_file_answers_as_the_module_for_other_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TwoInputs().train()
    made = export_module(module, samples(), tmp_path / "m.onnx", dynamic={"pixels": [1, 2]})
    assert module.training  # it was put back
    assert made.parity["cases"] == 5 + 2 * 2
    session = ExportedSession.open(tmp_path / "m.onnx", threads=1)
    assert session.model == made
    assert [(each.name, each.dtype, each.shape) for each in made.inputs] == [
        ("pixels", "uint8", (None, None, None, 3)),
        ("weights", "float32", (None,)),
    ]
    pixels = np.random.default_rng(2).integers(0, 256, (6, 9, 2, 3), np.uint8)
    weights = np.linspace(0, 1, 6, dtype=np.float32)
    found = session.run({"pixels": pixels, "weights": weights})
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(pixels), torch.from_numpy(weights))
    np.testing.assert_allclose(found["scores"], expected["scores"].numpy(), atol=1e-6)
    np.testing.assert_array_equal(found["best"], expected["best"].numpy())
    assert b"pickle" not in (tmp_path / "m.onnx").read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {"m.onnx", "m.onnx.json"}


class Other(torch.nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        """Return the function's result."""
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x + torch.rand_like(x), "differs between two calls"),
        (lambda x: x * 2 if x.sum() > 0 else x, "cannot be exported"),
        (lambda x: x if len(x) == 2 else 2 * x, "cannot be exported"),
        (lambda _: "text", "forward returned str: want a tensor"),
        (lambda x: {"a": x, "b": 3}, "forward returned dict: want a tensor"),
    ],
)
def test_a_module_that_cannot_be_exported_is_refused(function: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=text):
        export_module(Other(function), torch.ones(2, 3), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_graph_with_other_answers_is_refused_and_the_former_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_module(Other(lambda x: x * 2), torch.ones(2, 3), tmp_path / "m.onnx")
    former = [(tmp_path / name).read_bytes() for name in ("m.onnx", "m.onnx.json")]
    real = graphs.exported_graph

    def wrong(module: torch.nn.Module, *rest: Any) -> bytes:
        return real(Other(lambda x: module(x) * 1.001), *rest)

    monkeypatch.setattr(modules, "exported_graph", wrong)
    with pytest.raises(DataError, match=r"output 'output' for inputs of .* differs from the module's by 0\.001"):
        export_module(Other(lambda x: x * 2), torch.ones(2, 3), tmp_path / "m.onnx")
    monkeypatch.setattr(
        modules, "exported_graph", lambda module, *rest: real(Other(lambda x: module(x) + (x > 5).long()), *rest)
    )
    with pytest.raises(DataError, match=r"differs from the module's"):
        export_module(Other(lambda x: (x * 2).long()), torch.tensor([[3.0, 6.0]]), tmp_path / "m.onnx")
    assert [(tmp_path / name).read_bytes() for name in ("m.onnx", "m.onnx.json")] == former


def test_bad_samples_and_places_are_refused(tmp_path: Path) -> None:
    module = Other(lambda x: x)
    path = tmp_path / "m.onnx"
    for wrong, text in (
        ((torch.ones(2), torch.ones(2)), "2 samples: forward takes 1"),
        ({"x": torch.ones(())}, "want at least one row"),
        ({"x": [1.0]}, "sample 'x' is a list: want a tensor"),
        ((), "no samples"),
    ):
        with pytest.raises(ArgumentError, match=text):
            export_module(module, wrong, path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"have batches of \{'pixels': 4, 'weights': 2\}"):
        export_module(TwoInputs(), {**samples(), "weights": torch.ones(2)}, path)
    with pytest.raises(ArgumentError, match="dynamic dimensions of 'y': want one of the inputs, x"):
        export_module(module, torch.ones(2, 3), path, dynamic={"y": [1]})
    with pytest.raises(ArgumentError, match="dynamic dimension 2 of 'x': want 0 to 1"):
        export_module(module, torch.ones(2, 3), path, dynamic={"x": [2]})
    path.write_bytes(b"notes")
    with pytest.raises(ArgumentError, match="is there already"):
        export_module(module, torch.ones(2, 3), path)
    assert path.read_bytes() == b"notes"


def test_each_part_of_a_module_keeps_its_mode(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).train()
    module[1].eval()
    export_module(module, torch.ones(2, 3), tmp_path / "m.onnx")
    assert [each.training for each in module.modules()] == [True, True, False]


def test_answers_without_a_finite_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"output 'output' for inputs of .* has no finite number, so nothing can be"):
        export_module(Other(lambda x: x * float("nan")), torch.ones(2, 3), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "exported_graph", lambda *_: pytest.fail("exported before the check"))
    with pytest.raises(ArgumentError, match=r"there is no folder '.*/none'; make it, or give another name"):
        export_module(Other(lambda x: x), torch.ones(2, 3), tmp_path / "none" / "m.onnx")


def test_a_kill_between_the_two_files_keeps_the_former_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    made = export_module(Other(lambda x: x + 1), torch.ones(2, 3), path)
    real, synced = os.fsync, []

    def killed(file: int) -> None:
        synced.append(file)
        if len(synced) == 2:
            raise KeyboardInterrupt
        real(file)

    graph = path.read_bytes() + MARK.encode()
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_exported(path, graph, replace(made, digest=digest_of(graph)))
    assert read_exported(path)[1] == made
    assert {each.name for each in tmp_path.iterdir()} == {"m.onnx", "m.onnx.json"}


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    export_module(Other(lambda x: x + 1), torch.ones(2, 3), path)
    beside, graph = record_path(path), path.read_bytes()
    record = beside.read_text()
    path.write_bytes(graph + b"\0")
    with pytest.raises(DataError, match="the files do not belong together"):
        read_exported(path)
    path.write_bytes(graph)
    told = json.loads(record)
    for change, text in (
        ({"multiring_export": 2}, "is malformed"),
        ({"inputs": [{"name": "x"}]}, "is malformed"),
        ({"inputs": []}, "inputs and outputs are not those"),
    ):
        beside.write_text(json.dumps({**told, **change}))
        with pytest.raises(DataError, match=text):
            ExportedSession.open(path)
    beside.write_text("[" * 100_000)
    with pytest.raises(DataError, match="is malformed"):
        read_exported(path)
    beside.unlink()
    with pytest.raises(DataError, match=r"has no m\.onnx\.json beside it"):
        read_exported(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_exported(tmp_path / "other.onnx")


PROGRAM = """
import torch

def build():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), torch.rand(3, 4)

def one():
    return torch.nn.ReLU()
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, out = tmp_path / "own_model.py", tmp_path / "m.onnx"
    program.write_text(PROGRAM)
    assert main(["export", f"{program}:build", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("5 comparisons, largest difference ")
    assert main(["export", f"{program}:build", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parity"]["cases"] == 5
    for words, text in (
        ([f"{program}:one", "--out", str(out)], "returned a ReLU: want (module, samples)"),
        ([f"{program}:two", "--out", str(out)], "has no function 'two'"),
        ([str(program), "--out", str(out)], "want MODULE:FUNCTION"),
        ([f"{tmp_path}/none.py:build", "--out", str(out)], "there is no such file"),
        (["no_such_module:build", "--out", str(out)], "module 'no_such_module' is not found from"),
        ([f"{program}:build", "--out", str(out), "--dynamic", "x"], "--dynamic 'x': want NAME=DIM"),
        ([f"{program}:build", "--out", str(out), "--tolerance", "0"], "--tolerance 0: want a number above 0"),
    ):
        assert main(["export", *words]) == 2
        assert text in capsys.readouterr().err
