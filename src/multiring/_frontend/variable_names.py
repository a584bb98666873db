"""Names of variables that the ranks can compare, though each process numbers its layers by itself."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

# A word of a name, and the number that a framework may have appended: "dense" and 1 in "sequential/dense_1/kernel".
_WORD = re.compile(r"([^_/:\d][^_/:]*)(?:_(\d+))?(?=[_/:]|$)")


@lru_cache(maxsize=256)  # an eager program asks in each step
def comparable_names(names: tuple[str, ...]) -> Sequence[str]:
    """Return names that are equal on all ranks whose variables are those of the same model.

    Keras and TensorFlow number layers of one kind within a process, so a rank that has made another model before has
    other numbers. Each number is replaced by the place of its first occurrence.
    """
    places: dict[str, dict[str, int]] = {}

    def numbered(found: "re.Match[str]") -> str:
        word, number = found[1], found[2] or ""
        known = places.setdefault(word, {})
        place = known.setdefault(number, len(known))
        return f"{word}_{place}" if place else word

    return tuple(_WORD.sub(numbered, name) for name in names)


def names_of_variables(variables: Iterable[object]) -> Sequence[str]:
    """Return comparable names of variables of Keras or TensorFlow; "tensor" for another object."""
    return comparable_names(tuple(map(_name_of, variables)))


def _name_of(variable: object) -> str:
    name = getattr(variable, "path", None) or getattr(variable, "name", None) if hasattr(variable, "assign") else None
    return str(name or "tensor").removesuffix(":0")
