"""A rank whose call has no arrays meets the other ranks' calls of groups, which may have some."""

from typing import Any

from multiring._frontend.handles import Name, PartsOfGroup, Prefixed, Several, Unnamed, submit
from multiring._frontend.process_sets import Members
from multiring._frontend.signatures import OPERATION, PART
from multiring._runtime import Group, Handle


def meet_without_arrays(members: Members, name: Name, operation: str) -> None:
    """Meet the other ranks in a group's call without arrays.

    If they have arrays, they would otherwise take this rank's next call for this one.

    Raises:
        CollectiveError: on every rank: the groups of other ranks have arrays.
    """
    if members.size == 1:
        return
    known = Unnamed(members.next_number(), "") if name is None else name
    signature = ((OPERATION, f"{operation} of a group without arrays"), (PART, "0 of 0"))

    def start(group: Group, label: str) -> Handle:
        return group.barrier_async(label=label)

    def finish(found: Any) -> Any:
        return found

    # The signature names another operation than the name does.
    prefixed = Prefixed(operation, known) if isinstance(known, str) else known
    pending = submit(members, prefixed, signature, start, finish)
    Several([pending], list, PartsOfGroup(members, known, operation, 0)).wait()
