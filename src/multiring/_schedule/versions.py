"""Versions: numbers that identify how the bits of a chunk were computed.

Equal versions mean equal bits.

A version is a rank's own contribution, a combination of versions in some order, or a version after a lossy wire.
"""

from multiring._schedule.kinds import Wire

Version = int


class Versions:
    """Number histories: equal histories get equal numbers, on any rank."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], Version] = {}
        self._coded: dict[Version, Wire] = {}  # the wire that each encoded version passed last

    def own(self, rank: int, home: int) -> Version:
        """Return the version of `rank`'s contribution to block `home`."""
        return self._number("own", rank, home)

    def combined(self, versions: tuple[Version, ...], *, last: bool) -> Version:
        """Return the version that a REDUCE computes from `versions`, in this order."""
        return self._number("combined", versions, last)

    def coded(self, version: Version, wire: Wire) -> Version:
        """Return the version after a lossy wire.

        Encoding with the same wire again changes nothing.
        """
        if not wire or self._coded.get(version) is wire:
            return version
        number = self._number("coded", version, wire)
        self._coded[number] = wire
        return number

    def _number(self, *history: object) -> Version:
        return self._numbers.setdefault(history, len(self._numbers) + 1)
