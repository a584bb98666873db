"""Divide pictures into parts for training, validation and test, without a duplicate or a group on two sides.

A split is a function of the pictures' keys, their groups and the seed. It depends neither on the order in which the
pictures are given nor on the machine.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multiring._arguments import is_number, is_of, require_seed, shown
from multiring.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitUnit:
    """Pictures that must stay together.

    Attributes:
        members: their keys, such as paths.
        classes: the classes of their labels, one for each picture that has a class.
    """

    members: tuple[str, ...]
    classes: tuple[str, ...] = ()


def split(units: Sequence[SplitUnit], shares: Mapping[str, float], seed: int) -> dict[str, tuple[str, ...]]:
    """Divide pictures into parts.

    Units are drawn in an order that the seed decides, the largest first, and each goes to the part that lacks most of
    the unit's classes and pictures. So parts have about the wanted shares of each class, as far as the units allow.

    Args:
        units: the pictures, in units that stay together. No key may be in two units.
        shares: the wanted share of each part, by its name, such as {"train": 0.8, "val": 0.2}. They add up to 1.
        seed: another seed gives another split.

    Returns:
        The keys of each part, ascending.

    Raises:
        ArgumentError: the shares are not positive or do not add up to 1; the seed is not a whole number; a key is in
            two units; or a part would be empty, because there are fewer units than parts.
    """
    # Written so that nan is refused, too.
    are_shares = is_of(shares, Mapping) and all(is_number(each) and 0 < each <= 1 for each in shares.values())
    if not are_shares or not abs(sum(shares.values()) - 1) <= 1e-9:
        raise ArgumentError(f"shares {shown(shares)}: want numbers above 0 that add up to 1")
    seed = require_seed("seed", seed)
    counts = Counter(key for unit in units for key in unit.members)
    if twice := sorted(key for key, count in counts.items() if count > 1):
        raise ArgumentError(f"picture {twice[0]!r} is in {counts[twice[0]]} units: want each picture in one")
    if len(units) < len(shares):
        raise ArgumentError(
            f"{len(units)} independent groups of pictures for {len(shares)} parts: want at least one group a part; "
            "duplicates, frames of a video and stated groups stay together"
        )
    total = sum(len(unit.members) for unit in units)
    of_classes = Counter(name for unit in units for name in unit.classes)
    got: dict[str, Counter[str]] = {part: Counter() for part in shares}
    members: dict[str, list[str]] = {part: [] for part in shares}
    ordered = sorted(units, key=lambda unit: (-len(unit.members), _drawn(seed, min(unit.members))))
    for number, unit in enumerate(ordered):
        empty = [part for part in shares if not members[part]]
        # The last units go to the parts that would otherwise stay empty.
        among = empty if len(empty) == len(ordered) - number else list(shares)
        own = sorted(Counter(unit.classes).items())
        lacks = {}
        for part in among:
            missing = shares[part] - len(members[part]) / total
            by_class = sum(count * (shares[part] - got[part][name] / of_classes[name]) for name, count in own)
            lacks[part] = (by_class if own else missing, missing)
        best = max(among, key=lacks.__getitem__)  # the first of equals
        members[best] += unit.members
        got[best].update(unit.classes)
    return {part: tuple(sorted(keys)) for part, keys in members.items()}


def _drawn(seed: int, key: str) -> bytes:
    return hashlib.sha256(f"{seed}\n{key}".encode()).digest()


def split_digest(parts: Mapping[str, Sequence[str]]) -> str:
    """Return a digest of which pictures are in which part: SHA-256 as hexadecimal digits."""
    text = json.dumps({part: sorted(keys) for part, keys in sorted(parts.items())}, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
