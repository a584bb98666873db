"""Shampoo: against a reference in NumPy, on several ranks, and its state."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plain import join
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring.errors import ArgumentError, MultiringError, StateError

BETAS, EPS, RATE, DECAY = (0.9, 0.95), 1e-8, 0.1, 0.05
SHAPES = ((6, 4), (7,), (3, 2, 2), (1, 5), (5, 9))
Array = np.ndarray[Any, np.dtype[np.float64]]


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradient(step: int, number: int) -> Tensor:
    """Return a gradient whose rows and columns have different sizes, so that no two eigenvalues are alike."""
    shape = SHAPES[number]
    generator = torch.Generator().manual_seed(100 * step + number)
    sizes = [1.6 ** torch.arange(side, dtype=torch.float64) for side in shape]
    found = torch.randn(shape, generator=generator, dtype=torch.float64)
    for axis, size in enumerate(sizes):
        found *= size.view([-1 if at == axis else 1 for at in range(len(shape))])
    found /= found.norm()
    return found


def train(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range, without: tuple[int, ...] = ()
) -> None:
    for step in steps:
        for number, each in enumerate(parameters):
            each.grad = None if number in without else gradient(step, number).to(each.dtype)
        optimizer.step()


def of(parameters: Any, **options: Any) -> mt.Shampoo:
    how = mt.Eigendecomposition(**{"frequency": 3, "block": 5, **options})
    return mt.Shampoo(parameters, RATE, BETAS, EPS, DECAY, eigendecomposition=how)


# ---- one process ----


def adam(moment: Array, second: Array, step: int) -> Array:
    return moment / (1 - BETAS[0] ** step) / (np.sqrt(second / (1 - BETAS[1] ** step)) + EPS)


def basis_of(covariance: Array, old: Array | None, method: str) -> Array:
    if old is None or method == "eigh":
        vectors: Array = np.linalg.eigh(covariance)[1]
        return vectors[:, ::-1]
    order = np.argsort(-np.einsum("ij,ik,kj->j", old, covariance, old), kind="stable")
    found: Array = np.linalg.qr(covariance @ old[:, order])[0]
    return found


def reference(start: Array, gradients: list[Array], method: str, frequency: int) -> Array:
    """Return a block after training with `gradients`: the paper's formulas, one after the other."""
    rows, columns = start.shape
    weight: Array = start.copy()
    moment, second, own = 0 * start, 0 * start, 0 * start
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    bases: tuple[Array, Array] | None = None
    for step, g in enumerate(gradients, 1):
        left = BETAS[1] * left + (1 - BETAS[1]) * g @ g.T
        right = BETAS[1] * right + (1 - BETAS[1]) * g.T @ g
        moment = BETAS[0] * moment + (1 - BETAS[0]) * g
        own = BETAS[1] * own + (1 - BETAS[1]) * g**2
        update = adam(moment, own, step)
        if bases is not None:
            u, v = bases
            second = BETAS[1] * second + (1 - BETAS[1]) * (u.T @ g @ v) ** 2
            turned = u @ adam(u.T @ moment @ v, second, step) @ v.T
            update = turned * np.linalg.norm(update) / np.linalg.norm(turned)
        weight = weight * (1 - RATE * DECAY) - RATE * update
        if step % frequency:
            continue
        u, v = basis_of(left, bases and bases[0], method), basis_of(right, bases and bases[1], method)
        if bases is None:
            second = np.outer(np.diag(u.T @ left @ u), np.diag(v.T @ right @ v)) / np.trace(left)
        else:
            second = np.square(bases[0].T @ u).T @ second @ np.square(bases[1].T @ v)
        bases = u, v
    return weight


@pytest.mark.parametrize("method", ["qr", "eigh"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_shampoo_is_the_reference(method: str, dtype: torch.dtype, bound: float) -> None:
    parameters, steps = weights(dtype), 11
    train(of(parameters, method=method, precision=torch.float64), parameters, range(steps))
    starts = [each.detach().double().numpy() for each in weights()]
    for number, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
        rows = start.shape[0] if start.ndim > 1 else 1
        gradients = [gradient(step, number).numpy().reshape(rows, -1) for step in range(steps)]
        found, whole = parameter.detach().double().numpy().reshape(rows, -1), start.reshape(rows, -1)
        # A side of more than five is two blocks; what is no matrix never gets bases.
        cuts = [[0, size] if size <= 5 else [0, size // 2, size] for size in whole.shape]
        frequency = 3 if min(whole.shape) > 1 else steps + 1
        for top, bottom in zip(cuts[0], cuts[0][1:], strict=False):
            for first, last in zip(cuts[1], cuts[1][1:], strict=False):
                part = np.s_[top:bottom, first:last]
                wanted = reference(whole[part], [each[part] for each in gradients], method, frequency)
                assert np.abs(found[part] - wanted).max() < bound, (number, part)


def test_without_bases_it_is_adamw() -> None:
    own, plain = weights(), weights()
    train(of(own, frequency=100), own, range(8))
    train(torch.optim.AdamW(plain, RATE, BETAS, EPS, DECAY), plain, range(8))
    for one, other in zip(own, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("broken", [(), ("eigh",), ("eigh", "householder_product")])
def test_a_decomposition_that_fails(broken: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Tensor) -> Any:
        raise RuntimeError("did not converge")

    parameters = weights()
    optimizer = of(parameters, method="eigh")
    train(optimizer, parameters, range(4))
    before = optimizer.state[parameters[0]]["0.left_basis"]
    for each in broken:
        monkeypatch.setattr(torch.linalg, each, fail)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(optimizer, parameters, range(4, 7))
    is_kept = len(broken) == 2
    assert torch.equal(optimizer.state[parameters[0]]["0.left_basis"], before) == is_kept
    assert ["at step 6: its last bases are kept" in str(each.message) for each in warned] == [True] * 5 * is_kept
    assert all(each.isfinite().all() for each in parameters)


def test_gradients_of_zero_and_of_one_direction() -> None:
    for direction in (torch.zeros(6, 4), torch.ones(6, 1) * torch.tensor([1.0, 0.0, 0.0, 0.0])):
        parameter = nn.Parameter(torch.ones(6, 4))
        optimizer = mt.Shampoo([parameter], 0.1, eigendecomposition=mt.Eigendecomposition(frequency=2))
        for _ in range(9):
            parameter.grad = direction.clone()
            optimizer.step()
        assert parameter.isfinite().all()


def test_16_bits_keep_their_state_in_float32() -> None:
    parameters = weights(torch.bfloat16)
    optimizer = of(parameters)
    train(optimizer, parameters, range(4))
    other = of(copied := [nn.Parameter(each.detach().clone()) for each in parameters])
    other.load_state_dict(optimizer.state_dict())
    kept = [tensor for state in other.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]
    assert {each.dtype for each in kept} == {torch.float32}
    third = copy.deepcopy(other)
    for each, own in ((optimizer, parameters), (other, copied), (third, third.param_groups[0]["params"])):
        train(each, own, range(4, 8))
        assert all(torch.equal(one, wanted) for one, wanted in zip(own, parameters, strict=True))


def test_parameters_without_a_gradient_begin_later() -> None:
    parameters = weights()
    optimizer = of(parameters)
    train(optimizer, parameters, range(3), without=(0, 1))
    again = of(others := weights())
    train(again, others, range(3), without=(0, 1))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, each in ((parameters, optimizer), (others, again)):
        train(each, own, range(3, 7))
    assert [optimizer.state[each]["step"] for each in parameters] == [4, 4, 7, 7, 7]
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda each: mt.Shampoo(each, -1.0), "lr=-1.0"),
        (lambda each: mt.Shampoo(each, betas=(0.9, 1.0)), "betas=1.0"),
        (lambda _: mt.Eigendecomposition(frequency=0), "frequency=0: want a whole number, 1 or more"),
        (lambda _: mt.Eigendecomposition(block=True), "block=True"),
        (lambda _: mt.Eigendecomposition(method="svd"), "method='svd': want 'qr' or 'eigh'"),
        (lambda _: mt.Eigendecomposition(precision=torch.float16), "want torch.float32 or torch.float64"),
        (lambda _: mt.Shampoo([torch.zeros(2, 2, dtype=torch.complex64)]), "want real numbers"),
    ],
)
def test_bad_arguments(make: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        make(weights())


@pytest.mark.parametrize("kind", [mt.Shampoo, mt.Muon])
@pytest.mark.parametrize("is_part", [False, True])
def test_a_refused_group_is_not_kept(kind: Any, is_part: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 -- of pytest
    optimizer = kind([torch.zeros(3, 3, requires_grad=True)])
    refused = torch.zeros(2, 2, dtype=torch.float32 if is_part else torch.complex64)
    monkeypatch.setattr(f"{kind.__module__}.is_dtensor", lambda each: is_part and each is refused)
    with pytest.raises(MultiringError, match=r"\(2, 2\).*; (want|give)"):
        optimizer.add_param_group({"params": [torch.zeros(4, 4), refused]})
    assert len(optimizer.param_groups) == 1


# ---- ranks ----


def test_ranks_divide_the_state_and_any_number_loads_it(tmp_path: Path) -> None:
    wanted = weights()
    train(of(wanted), wanted, range(7))
    halves = run_ranks(train_and_save, 2, tmp_path)
    assert halves[0][0] > 0 < halves[1][0]  # blocks of each rank
    own = of(weights())
    train(own, own.param_groups[0]["params"], range(4))
    assert sum(blocks for blocks, _ in halves) == sum(key.endswith(".left") for s in own.state.values() for key in s)
    for found in (halves, run_ranks(load_and_train, 3, tmp_path), run_ranks(load_and_train, 1, tmp_path)):
        for _, trained in found:
            for one, other in zip(trained, wanted, strict=True):
                assert np.abs(one - other.detach().numpy()).max() < 1e-10


def train_and_save(here: Here, folder: Path) -> tuple[int, list[Array]]:
    join(here)
    parameters = weights()
    optimizer = of(parameters)
    train(optimizer, parameters, range(4))
    blocks = sum(key.endswith(".left") for state in optimizer.state.values() for key in state)
    with pytest.raises(StateError, match=r"gather_state\(\) on every rank"):
        optimizer.state_dict()
    with pytest.raises(StateError, match="a copy of Shampoo"):
        copy.deepcopy(optimizer)
    mt.save(folder / "run", weights=dict(enumerate(map(torch.Tensor.detach, parameters))), optimizer=optimizer)
    other = of(copied := [nn.Parameter(each.detach().clone()) for each in parameters])
    if here.rank == 1:
        other.load_state_dict(optimizer.state_dict())
    mt.broadcast_optimizer_state(other, root_rank=1)
    state = mt.elastic.TorchState(optimizer=optimizer)
    train(optimizer, parameters, range(9, 10))  # a step that is rolled back
    state.restore()
    with torch.no_grad():
        for each, kept in zip(parameters, copied, strict=True):
            each.copy_(kept)
    train(optimizer, parameters, range(4, 7))
    train(other, copied, range(4, 7))
    assert all(torch.equal(one, two) for one, two in zip(parameters, copied, strict=True))
    return blocks, [each.detach().numpy() for each in parameters]


def load_and_train(here: Here, folder: Path) -> tuple[int, list[Array]]:
    join(here)
    parameters = weights()
    optimizer = of(parameters)
    found = mt.load(folder / "run", optimizer=optimizer)
    with torch.no_grad():
        for number, each in enumerate(parameters):
            each.copy_(found["weights"][number])
    train(optimizer, parameters, range(4, 7))
    return 0, [each.detach().numpy() for each in parameters]


def test_added_parameters_leave_the_owners() -> None:
    run_ranks(add_later, 2)


def add_later(here: Here) -> None:
    join(here)
    parameters = weights()
    optimizer = of(parameters[:3])
    train(optimizer, parameters[:3], range(4))
    optimizer.add_param_group({"params": parameters[3:]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, parameters, range(4, 8))
    optimizer.gather_state()
    steps = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert steps == [8, 8, 8, 4, 4]


def test_ranks_that_have_changed_must_load_first() -> None:
    run_ranks(change_ranks, 2)


def change_ranks(here: Here) -> None:
    join(here)
    parameters = weights()
    optimizer = of(parameters)
    train(optimizer, parameters, range(2))
    if here.rank == 0:  # as after joining another job, on one of the ranks
        optimizer._divided_among = object()
    with pytest.raises(StateError, match="the ranks have changed since its last step"):
        optimizer.gather_state()
