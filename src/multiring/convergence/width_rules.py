"""Rules that carry a learning rate from a narrow network to a wide one: per parameter, from its shapes in both.

The rules keep the size of what a step changes in a layer's outputs the same at every width. So the best learning rate
of a narrow network is nearly the best rate of a wide one. Without them it falls as the network gets wider.

    growth of       initial deviation     rate of Adam     rate of SGD
    outputs only    as in the narrow      as it is         x growth
    both            / root of growth      / growth         as it is
    inputs only     / growth              / growth         / growth

Source: Yang et al., "Tensor programs V: tuning large neural networks via zero-shot hyperparameter transfer", 2022,
arXiv 2203.03466, table 3.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from multiring._arguments import require_choice
from multiring.errors import ArgumentError

Axes = tuple[int | None, int | None]
_NARROW = 32  # below this, widths are too small for rules that hold for large ones
_FAR = 16.0  # the largest growth that is carried without a doubt


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthRule:
    """What changes for one parameter when the network gets wider.

    Attributes:
        kind: "input" if only its outputs grow, "output" if only its inputs do, "hidden" if both do, "fixed" if neither.
        rate: the factor of its learning rate.
        deviation: the factor of the standard deviation of its initial values.
    """

    kind: str
    rate: float
    deviation: float

    @property
    def decay(self) -> float:
        """The factor of decoupled weight decay: a step decays by its product with the rate, which has to stay."""
        return 1.0 / self.rate


class WidthRules(Mapping[str, WidthRule]):
    """The rule of each parameter, by name, and the reasons not to trust them.

    Attributes:
        doubts: sentences; empty if nothing speaks against the rules. Only shapes are known here: see the page for what
            else has to hold.
    """

    def __init__(self, by_name: Mapping[str, WidthRule], doubts: Sequence[str]) -> None:
        self._by_name, self.doubts = dict(by_name), tuple(doubts)

    def __getitem__(self, name: str) -> WidthRule:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __str__(self) -> str:
        long = max(map(len, self))
        lines = [f"{'':<{long}}  kind          rate  deviation"]
        lines += [
            f"{name:<{long}}  {each.kind:<8}{each.rate:>10.4g}{each.deviation:>11.4g}" for name, each in self.items()
        ]
        return "\n".join([*lines, *(f"doubt: {each}" for each in self.doubts)])


def width_rules(
    narrow: Mapping[str, Sequence[int]],
    full: Mapping[str, Sequence[int]],
    *,
    optimizer: str = "adam",
    axes: Mapping[str, Axes] | None = None,
) -> WidthRules:
    """Return what to change per parameter, so that a narrow network's learning rate fits a wider one.

    Args:
        narrow: the shapes of the narrow network's parameters, by name.
        full: those of the wider network, with the same names.
        optimizer: "adam" for Adam and its relatives (AdamW, NAdam), "sgd" for SGD with or without momentum.
        axes: for each parameter whose first axis is not of outputs and second of inputs, both axes: (1, 0) for an
            embedding, and None for an axis that it lacks. A vector has outputs only.

    Raises:
        ArgumentError: the networks have other names or numbers of axes, an axis grows that is neither of inputs nor of
            outputs, a side is not larger than 0, or nothing grows.
    """
    require_choice("optimizer", optimizer, ("adam", "sgd"))
    if set(narrow) != set(full):
        strange = sorted(set(narrow) ^ set(full))
        raise ArgumentError(
            f"parameter {strange[0]!r} is in one of the networks only: want the same layers in both, of other widths"
        )
    if unknown := sorted(set(axes or {}) - set(full)):
        raise ArgumentError(f"axes of {unknown[0]!r}: want names of parameters, such as {next(iter(full), '')!r}")
    grown = {name: _growth(name, narrow[name], full[name], (axes or {}).get(name)) for name in full}
    rules = {name: _rule(*each, optimizer) for name, each in grown.items()}
    if all(each.kind == "fixed" for each in rules.values()):
        raise ArgumentError("the two networks have the same shapes: want a narrow one and a wider one")
    return WidthRules(rules, list(_doubts(narrow, full, grown)))


def _growth(name: str, narrow: Sequence[int], full: Sequence[int], axes: Axes | None) -> tuple[float, float]:
    """Return by how much a parameter's outputs and inputs grow."""
    if len(narrow) != len(full) or min((*narrow, *full), default=1) < 1:
        raise ArgumentError(
            f"parameter {name!r} has shapes {tuple(narrow)} and {tuple(full)}: want as many axes in both, and "
            "no empty one"
        )
    outputs, inputs = axes or (0, 1)
    grown = [wide / small for wide, small in zip(full, narrow, strict=True)]
    for axis, each in enumerate(grown):
        if each != 1 and axis not in {outputs, inputs}:
            raise ArgumentError(
                f"parameter {name!r} grows from {tuple(narrow)} to {tuple(full)} in axis {axis}: want growth of its "
                f"outputs' axis {outputs} and its inputs' axis {inputs}; name others by axes={{{name!r}: (outputs, "
                "inputs)}"
            )
    return _at(grown, outputs), _at(grown, inputs)


def _at(grown: Sequence[float], axis: int | None) -> float:
    return grown[axis] if axis is not None and axis < len(grown) else 1.0


def _rule(outputs: float, inputs: float, optimizer: str) -> WidthRule:
    kind = {(False, False): "fixed", (True, False): "input", (False, True): "output", (True, True): "hidden"}
    # A layer's outputs keep their size. If they grow less than its inputs, what training adds to them is the larger
    # part, because its terms all point one way; the first values must not hide it.
    deviation = math.sqrt(1 / inputs) * min(1.0, math.sqrt(outputs / inputs))
    rate = 1 / inputs if optimizer == "adam" else outputs / inputs
    return WidthRule(kind=kind[outputs != 1, inputs != 1], rate=rate, deviation=deviation)


def _doubts(
    narrow: Mapping[str, Sequence[int]], full: Mapping[str, Sequence[int]], grown: Mapping[str, tuple[float, float]]
) -> Iterator[str]:
    """Yield the reasons for doubt that shapes alone can give."""
    kinds = {(outputs != 1, inputs != 1) for outputs, inputs in grown.values()}
    sizes = [
        small
        for name in full
        for small, wide in zip(narrow[name], full[name], strict=True)
        if small != wide and len(full[name]) > 1
    ]
    if sizes and min(sizes) < _NARROW:
        yield f"a width of {min(sizes)} is narrow: the rules hold for large widths; want {_NARROW} or more"
    most = max(max(outputs, inputs) for outputs, inputs in grown.values())
    least = min(min(outputs, inputs) for outputs, inputs in grown.values())
    if most > _FAR:
        yield f"the width grows {most:g}-fold: at more than {_FAR:g}, check the rate at a width in between"
    if least < 1:
        yield f"a width shrinks to {least:.2g} of it: the rules are for networks that get wider"
    if (False, True) not in kinds:
        yield "no parameter has inputs that grow and outputs that do not, as a last layer has: is it tied or missing?"
    if len({each for pair in grown.values() for each in pair} - {1.0}) > 1:
        yield "not all widths grow by the same factor: the rate is then carried less exactly"
