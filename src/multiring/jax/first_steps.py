"""Compare the ranks in the first steps of an optimizer in JAX.

A compiled JAX program cannot determine the number of its step. So the call that reduces the gradients has an additional
array, a flag. The process sets the flag in the second call. The program then takes a branch that passes its parameters
to the process. `multiring._frontend.requests.first_steps` compares the parameters and raises the errors.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import lax

from multiring._frontend.process_sets import members_of
from multiring._frontend.requests.first_steps import Watched, comparison_of, watch
from multiring._frontend.requests.text import ALL_GATHER
from multiring.jax.call import CustomCall, Ranks, sets
from multiring.jax.collectives import meet_without_arrays, reduction_call
from multiring.jax.primitive import bind, collective


@dataclass(frozen=True, slots=True)
class Watching:
    """The subject of a comparison, and texts for its error.

    key: identifies the reduction in this process.
    what: the caller's name for error messages.
    names: the names of the parameters.
    remedy: a text that says how to give all ranks the same parameters.
    sees: whether the ranks compare their local gradients.
    paths: the paths of the gradients, which the ranks compare in every step; see `CallSignature`.
    """

    key: Hashable
    what: str
    names: Sequence[str]
    remedy: str
    sees: bool
    paths: tuple[str, ...] = ()


def reduced(
    gradients: Sequence[Any],
    parameters: Sequence[Any] | None,
    watching: Watching,
    *,
    op: int | str,
    wire: str | None,
    process_set: Ranks,
) -> list[Any]:
    """Combine gradients like `allreduce`, and compare ranks in the first steps.

    Args:
        gradients: the gradient arrays.
        parameters: the parameters in the same order, or None if they are unknown.
        watching: the subject of the comparison.
        op: see `allreduce`.
        wire: see `allreduce`.
        process_set: see `allreduce`.
    """
    if not gradients:
        meet_without_arrays(reduction_call(gradients, op, wire=wire, process_set=process_set))
        return list(gradients)
    call = replace(reduction_call(gradients, op, wire=wire, process_set=process_set), paths=watching.paths)
    kind = jax.numpy.asarray(gradients[0]).dtype
    number = watch(watching.key, lambda: Watched(what=watching.what, sees=watching.sees, flagged=kind.name))
    members = members_of(sets[call.process_set])
    comparison = comparison_of(members, number)
    is_traced = any(isinstance(each, jax.core.Tracer) for each in (*gradients, *(parameters or ())))
    if comparison is None or (not is_traced and comparison.is_over):
        return list(bind(call, gradients))
    *found, flag = bind(replace(call, root=number), [*gradients, jax.numpy.zeros(1, kind)])
    if parameters is None:
        return found
    shown = [lax.stop_gradient(jax.numpy.asarray(each)) for each in parameters]
    show = _show_of(shown, watching, number, call.process_set)
    looks = lax.stop_gradient(flag)[0] > 0
    if not is_traced:
        if looks:
            jax.block_until_ready(show(*shown))
        return found
    seen = lax.cond(looks, show, lambda *_: jax.numpy.zeros(1, shown[0].dtype), *shown)
    # No computation needs the branch's result. The barrier keeps the branch, and orders it before the update.
    kept: list[Any] = list(lax.optimization_barrier((*found, seen)))
    return kept[:-1]


def _show_of(parameters: Sequence[Any], watching: Watching, number: int, process_set: int) -> Any:
    """Return a function that passes the parameters to the process, with one call per type."""
    places: dict[str, list[int]] = {}
    for place, each in enumerate(parameters):
        places.setdefault(each.dtype.name, []).append(place)
    calls = []
    for part, those in enumerate(places.values()):
        make = partial(
            Watched,
            what=watching.what,
            names=[watching.names[place] for place in those],
            remedy=watching.remedy,
            sees=False,
            follows=number,
            part=part,
        )
        own = watch((watching.key, "parameters", part), make)
        name = f"first steps {own}"  # the call's name; the call does not involve other ranks
        calls.append((CustomCall(ALL_GATHER, "", own, None, process_set, name, shows=True), those))

    def show(*arrays: Any) -> Any:
        found = [collective.bind(*(arrays[place] for place in those), call=call, keeps=False) for call, those in calls]
        return lax.optimization_barrier([results[0] for results in found])[0]

    return show
