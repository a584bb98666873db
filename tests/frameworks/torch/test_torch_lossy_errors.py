"""Errors of lossy gradient compression, and their texts."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.lossy import hand_over, parameters, residuals
from tests.support.plain import backward, join
from tests.support.ranks import Here, run_ranks
from torch import nn

import multiring.torch as mt
from multiring.errors import ArgumentError, MismatchError, MultiringError, StateError, UnsupportedError

Wrong = tuple[Callable[[], object], type[MultiringError], str]


def wrap(shared: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return mt.DistributedOptimizer(torch.optim.SGD(shared, lr=0.1), zip("abcd", shared, strict=False), **options)


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype))]


def check(wrong: list[Wrong]) -> None:
    """Check that each call raises its error, and that the group works afterwards."""
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
        assert mt.allreduce(torch.ones(1)).item() == 1.0


@pytest.mark.parametrize(("options", "text"), [({"rank": 0}, "rank=0"), ({"rank": 2, "seed": -1}, "seed=-1")])
def test_powersgd_of_no_such_rank(options: dict[str, int], text: str) -> None:
    with pytest.raises(ArgumentError, match=rf"PowerSGD\({text}\): want an integer >= "):
        mt.PowerSGD(**options)


def test_powersgd_of_half_a_rank() -> None:
    half: Any = 1.5
    with pytest.raises(ArgumentError, match=r"PowerSGD\(rank=1\.5\): want an integer >= 1"):
        mt.PowerSGD(half)


def test_bad_arguments() -> None:
    run_ranks(misuse, 2)


def misuse(here: Here) -> None:
    join(here)
    odd = here.rank == 1
    check(
        [
            (
                lambda: wrap(matrix(8, 8), compression="powersgd"),
                ArgumentError,
                r"compression='powersgd': want Compression.none, .* or PowerSGD\(rank=...\)",
            ),
            (
                lambda: wrap(matrix(8, 8, dtype=torch.float64), compression=mt.PowerSGD(1)),
                ArgumentError,
                r"parameter a is float64, and compression=PowerSGD\(rank=1, seed=0\) takes float32 .*: use model",
            ),
            (
                lambda: wrap([*matrix(8), *matrix(8, 7), *matrix(20, 2)], compression=mt.PowerSGD(4)),
                ArgumentError,
                r"PowerSGD\(rank=4, seed=0\) would compress no parameter: not even b, .* of \(8, 7\), .* lower rank",
            ),
            (
                lambda: wrap(matrix(8, 8), compression=mt.PowerSGD(1 + odd)),
                MismatchError,
                r"rank 0: op='average', .* compression=PowerSGD\(rank=1, seed=0\); rank 1: .*rank=2, seed=0",
            ),
            (lambda: wrap(matrix(8), compression="bf8"), ArgumentError, "compression='bf8': want Compression.none, "),
            (
                lambda: wrap(matrix(8, 8), op=mt.Adasum, compression=mt.PowerSGD(1)),
                ArgumentError,
                r"compression=PowerSGD\(rank=1, seed=0\) with op='adasum': want op=Average",
            ),
            (
                lambda: wrap(matrix(8), op=mt.Adasum, compression=mt.Compression.bf16, error_feedback=True),
                ArgumentError,
                "error_feedback=True with op='adasum'",
            ),
            (
                lambda: wrap(matrix(8, 8), error_feedback=True),
                ArgumentError,
                r"error_feedback=True without a wire type: .* compression=Compression\.fp16, \.bf16, \.int8 too",
            ),
            (
                lambda: wrap(matrix(8, dtype=torch.bfloat16), compression=mt.Compression.bf16, error_feedback=True),
                ArgumentError,
                r"is bfloat16, and compression=Compression\.bf16, error_feedback=True takes float32 gradients only",
            ),
            (
                lambda: wrap(matrix(8), compression=mt.Compression.int8 if odd else mt.Compression.bf16),
                MismatchError,
                r"rank 0: op='average', .*, compression=Compression\.bf16; rank 1: .*, compression=Compression\.int8",
            ),
            (
                lambda: mt.gradient_bytes(torch.optim.SGD(matrix(1))),
                ArgumentError,
                "SGD does not reduce gradients; want an optimizer from DistributedOptimizer",
            ),
        ]
    )
    embedding = nn.Embedding(40, 20, sparse=True)
    optimizer = wrap(list(embedding.parameters()), compression=mt.PowerSGD(1))
    check(
        [
            (
                lambda: backward(embedding(torch.tensor([1])).sum()),
                UnsupportedError,
                r"gradient of a is sparse_coo, and .* want sparse_as_dense=True, or Embedding\(sparse=False\)",
            ),
            (optimizer.step, StateError, "make the DistributedOptimizer anew"),
        ]
    )
    assert "multiring" not in optimizer.state_dict()  # it is unknown which gradients were sent


def test_one_rank_checks_as_well() -> None:
    run_ranks(misuse_alone, 1)


def misuse_alone(here: Here) -> None:
    join(here)
    with pytest.raises(ArgumentError, match="would compress no parameter"):
        wrap(matrix(2, 2), compression=mt.PowerSGD(1))
    optimizer = wrap(matrix(20, 20), compression=mt.PowerSGD(1))
    assert mt.gradient_bytes(optimizer) == 0
    assert "multiring" not in optimizer.state_dict()


class Lines(logging.Handler):
    """A handler that keeps the logged messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("multiring").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_states_that_do_not_fit() -> None:
    run_ranks(load_others, 2)


def load_others(here: Here) -> None:
    join(here)
    optimizer = wrap(parameters(), compression=mt.PowerSGD(1))
    hand_over(optimizer.param_groups[0]["params"], 0, here.rank)
    state = optimizer.state_dict()
    carried = state["multiring"]

    def load(**changed: Any) -> None:
        optimizer.load_state_dict({**state, "multiring": {**carried, **changed}})

    check(
        [
            (
                lambda: load(residuals={0: torch.zeros(8, 6)}),
                ArgumentError,
                r"of parameter 0 is of shape \(8, 6\), the parameter is of shape \(6, 8\); want the state_dict of",
            ),
            (lambda: load(residuals={9: torch.zeros(1)}), ArgumentError, r"parameter 9 is .* is no such parameter"),
        ]
    )
    log = Lines()
    load()
    assert log.lines == []
    assert torch.equal(residuals(optimizer)[0], carried["residuals"][0])
    for other in ({"rank": 1 - here.rank}, {"size": 3}):
        load(**other)
        assert len(log.lines) == 1
        assert f"this is rank {here.rank} of 2: the gradients that the saving rank had not sent" in log.lines.pop()
        assert not any(each.any() for each in residuals(optimizer).values())
        load()
    # An optimizer that has no use for the checkpoint's state logs this, too.
    plain = wrap(parameters())
    plain.load_state_dict(state)
    assert len(log.lines) == 1
    assert "a part of the gradients that this rank had not sent yet is discarded" in log.lines[0]
    assert "multiring" not in plain.state_dict()
