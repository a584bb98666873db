"""One block of a matrix under eigenvalue-corrected Shampoo: its covariances, their eigenbases, and Adam in these.

A block of shape (rows, columns) has the running means L of G Gᵀ and R of Gᵀ G over its gradients G. In the bases of
their eigenvectors, the elements of a gradient are nearly uncorrelated, which Adam's division by the root of each
element's second moment assumes. The state of a block is a dict of tensors, whose names `names_of` gives.

Sources: Gupta, Koren, Singer, "Shampoo: preconditioned stochastic tensor optimization", 2018, arXiv 1802.09568; Vyas et
al., "SOAP: improving and stabilizing Shampoo using Adam", 2024, arXiv 2409.11321; grafting: Agarwal et al.,
"Disentangling adaptive gradient methods from learning rates", 2020, arXiv 2002.11803.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

_ALWAYS = ("moment", "second", "left", "right")
# The moments are in the bases, once these are known; Adam's own, for grafting, are then kept beside them.
_WITH_BASES = ("left_basis", "right_basis", "grafted_moment", "grafted_second")

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How blocks are updated; Shampoo's arguments."""

    betas: tuple[float, float]
    eps: float
    grafting: bool
    frequency: int
    method: str  # "qr" or "eigh"
    precision: torch.dtype  # of the decompositions


def names_of(rule: Rule, steps: int) -> tuple[str, ...]:
    """Return the names in a block's state after `steps` steps."""
    with_bases = _WITH_BASES if rule.grafting else _WITH_BASES[:2]
    return _ALWAYS + (with_bases if steps >= rule.frequency else ())


def shape_of(name: str, rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of a tensor in the state of a block."""
    if name.startswith("left"):
        return rows, rows
    return (columns, columns) if name.startswith("right") else (rows, columns)


def cost_of(rows: int, columns: int, frequency: int) -> float:
    """Return about how many multiplications a step costs, averaged over `frequency` steps."""
    # Two products for the covariances, and four for the ways into the bases and back.
    products = 3 * rows * columns * (rows + columns)
    # A QR decomposition with its matrix costs about three products of the same size.
    return products + 5 * (rows**3 + columns**3) / frequency


def step(state: State, gradient: Tensor, steps: int, rule: Rule) -> tuple[Tensor, bool]:
    """Return the update for a learning rate of 1, and whether a decomposition failed, in which case old bases are kept.

    Args:
        state: the block's state, which is changed; empty before the first step.
        gradient: the block's gradient, of shape (rows, columns).
        steps: the number of this step, from 1.
        rule: the arguments of Shampoo.
    """
    first, second = rule.betas
    if not state:
        rows, columns = gradient.shape
        state.update({name: gradient.new_zeros(shape_of(name, rows, columns)) for name in _ALWAYS})
    # The product and the mean in one call: matrices of this size cost as much to read as to multiply.
    state["left"].addmm_(gradient, gradient.T, beta=second, alpha=1 - second)
    state["right"].addmm_(gradient.T, gradient, beta=second, alpha=1 - second)
    if "left_basis" in state:
        left, right = state["left_basis"], state["right_basis"]
        turned = left.T @ gradient @ right
        state["moment"].lerp_(turned, 1 - first)
        scaled = adam(state["moment"], turned, state["second"], steps, rule)
        if rule.grafting:
            own = state["grafted_moment"].lerp_(gradient, 1 - first)
            norm = adam(own, gradient, state["grafted_second"], steps, rule).norm()
            scaled.mul_(norm / scaled.norm().clamp(min=torch.finfo(scaled.dtype).tiny))  # bases keep the norm
        update = left @ scaled @ right.T
    else:
        state["moment"].lerp_(gradient, 1 - first)
        update = adam(state["moment"], gradient, state["second"], steps, rule)
    return update, steps % rule.frequency == 0 and not _refresh(state, rule)


def adam(moment: Tensor, gradient: Tensor, second: Tensor, steps: int, rule: Rule) -> Tensor:
    """Return Adam's update, and add the square of `gradient` to the running mean `second`."""
    second.mul_(rule.betas[1]).addcmul_(gradient, gradient, value=1 - rule.betas[1])
    correction = math.sqrt(1 - rule.betas[1] ** steps)
    root = second.sqrt().add_(rule.eps * correction)
    return torch.div(moment, root, out=root).mul_(correction / (1 - rule.betas[0] ** steps))


def _refresh(state: State, rule: Rule) -> bool:
    """Replace the bases by those of the present covariances; return False if that failed and the old ones are kept."""
    is_first = "left_basis" not in state
    if is_first:
        for side in ("left", "right"):
            state[f"{side}_basis"] = torch.eye(state[side].size(0), dtype=state[side].dtype, device=state[side].device)
        if rule.grafting:
            for name in ("moment", "second"):
                state[f"grafted_{name}"] = state[name].clone()
    found = []
    for side in ("left", "right"):
        covariance, old = state[side], state[f"{side}_basis"]
        new = _eigenvectors(covariance, rule.precision) if is_first or rule.method == "eigh" else None
        if new is None and not is_first:
            new = _iterated(covariance, old, rule.precision)
        if new is None:
            return False
        found.append(new)
    left, right = found
    turned = state["left_basis"].T @ left, state["right_basis"].T @ right
    state["moment"] = turned[0].T @ state["moment"] @ turned[1]
    if is_first:
        # Shampoo's own estimate: if the covariance is a Kronecker product, it is exact.
        trace = state["left"].trace()
        own = torch.outer(_diagonal(state["left"], left), _diagonal(state["right"], right))
        state["second"] = own.div_(trace) if trace > 0 else own.zero_()
    else:
        # Of uncorrelated elements with these second moments, the second moments in other bases.
        state["second"] = turned[0].square().T @ state["second"] @ turned[1].square()
    # Row-major like a loaded state, because products of the same numbers in another layout are rounded otherwise.
    state["left_basis"], state["right_basis"] = left.contiguous(), right.contiguous()
    return True


def _diagonal(covariance: Tensor, basis: Tensor) -> Tensor:
    """Return the diagonal of basisᵀ covariance basis, which no rounding makes negative."""
    return (covariance @ basis).mul_(basis).sum(0).clamp_(min=0)


def _eigenvectors(covariance: Tensor, precision: torch.dtype) -> Tensor | None:
    """Return the eigenvectors as columns, of the largest eigenvalue first; None if no way finds them."""
    for dtype, ridge in (
        (torch.promote_types(precision, covariance.dtype), 0.0),
        (torch.float64, 0.0),
        (torch.float64, 1e-6),
    ):
        matrix = covariance.to(dtype, copy=True)
        matrix.diagonal().add_(ridge * matrix.trace() / matrix.size(0))
        found = _finite(partial(_symmetric, matrix))
        if found is not None:
            return found.flip(1).to(covariance.dtype)
    return None


def _iterated(covariance: Tensor, basis: Tensor, precision: torch.dtype) -> Tensor | None:
    """Return `basis` after one step of orthogonal iteration, of the largest eigenvalue first; None if that fails."""
    dtype = torch.promote_types(precision, covariance.dtype)
    image = covariance.to(dtype) @ basis.to(dtype)
    # The first columns of a QR decomposition converge to the largest eigenvalues.
    order = image.mul(basis).sum(0).argsort(descending=True, stable=True)
    found = _finite(partial(_orthogonal, image[:, order]))
    return None if found is None else found.to(covariance.dtype)


def _orthogonal(matrix: Tensor) -> Tensor:
    # torch.linalg.qr would also make R, which nobody needs, in a quarter of its time.
    found: Tensor = torch.linalg.householder_product(*torch.geqrf(matrix))
    return found


def _symmetric(matrix: Tensor) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(matrix).eigenvectors
    return vectors


def _finite(decompose: Callable[[], Tensor]) -> Tensor | None:
    """Return the result of a decomposition; None if it does not converge, or is not finite."""
    try:
        found = decompose()
    except RuntimeError:  # torch.linalg.LinAlgError is one, but not every library's failure is one
        return None
    return found if found.isfinite().all() else None
