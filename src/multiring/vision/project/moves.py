"""Which pictures moved, told by the digests of files before and now."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet


def moved_files(now: Mapping[str, str], before: Mapping[str, str], gone: AbstractSet[str]) -> list[tuple[str, str]]:
    """Return the pairs (former path, path) of the pictures that moved.

    A picture moved if exactly one former place and exactly one new place have its digest. Where two files have the same
    bytes, nobody can tell which one moved.

    Args:
        now: the digests of the files that are new or have new content, by path.
        before: the digests of all pictures that were known, by path.
        gone: the known paths without a file.
    """
    left: dict[str, list[str]] = {}
    for path in sorted(gone | (set(now) & set(before))):
        if before[path]:
            left.setdefault(before[path], []).append(path)
    places = Counter(now.values())
    found = {
        left[digest][0]: path for path, digest in now.items() if len(left.get(digest, ())) == 1 and places[digest] == 1
    }
    while True:
        # A picture cannot move to a place whose own picture stays: that one's file was overwritten.
        kept = {former: path for former, path in found.items() if path not in before or path in found}
        if len(kept) == len(found):
            return sorted(kept.items())
        found = kept
