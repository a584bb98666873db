"""The values that a fingerprint tells apart, and the sample counter of workers."""

import pickle
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from multiring.torch.distributing.counting import Counting
from multiring.torch.distributing.fingerprints import LOOKED_AT, UNKNOWN, fingerprint

LONG = 3 * LOOKED_AT

TOLD_APART: list[Any] = [
    *(torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1), torch.ones(3), torch.tensor(0.0)),
    *(torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bool)),
    *(torch.arange(LONG), torch.arange(LONG).flip(0), torch.arange(LONG).reshape(3, -1).t()),
    *(np.arange(3), np.arange(3.0), np.float32(1), np.array([{"a": 1}, "b"], dtype=object)),
    *("text", b"text", 1, 1.0, True, 1j, [1], (1,), [[1]], ["text"], [1, 2], [2, 1], list(range(LONG))),
    *({"a": 1}, {"a": 2}, {"b": 1}, {"a": torch.ones(2), "b": object()}, {"a": torch.zeros(2), "b": object()}),
]


def test_values_that_differ() -> None:
    found = [fingerprint(value) for value in TOLD_APART]
    assert len(set(found)) == len(found)
    assert all(0 < each < 2**63 for each in found)
    assert [fingerprint(pickle.loads(pickle.dumps(value))) for value in TOLD_APART] == found  # noqa: S301 -- our own


def test_nothing_to_compare() -> None:
    nothing = [object(), None, [], {}, [object()], torch.empty(0), torch.ones(2, device="meta")]
    assert [fingerprint(value) for value in [*nothing, torch.ones(2).to_sparse()]] == [UNKNOWN] * 8


def test_counting_goes_to_workers_that_are_started_anew() -> None:
    counting: Counting = pickle.loads(pickle.dumps(Counting(default_collate, 1, 3, looks=True)))  # noqa: S301 -- our own
    batch, samples, total, least, seen = counting([5, 6, 7, 8, 9])
    assert (batch.tolist(), samples, total, least, seen) == ([6, 9], 2, 5, 1, fingerprint([5, 6, 7, 8, 9]))
    batch, samples, total, least, _ = counting([5])
    assert (batch.tolist(), samples, total, least) == ([5], 0, 1, 0)
