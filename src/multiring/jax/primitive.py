"""The collective as a primitive of JAX.

The primitive has rules for programs, gradients and vmap.

JAX dispatches a program with an effect from Python, which costs 15 us per array. So a call in an outermost program has
no effect. A rule for dead-code elimination keeps the call even if its results are unused, and XLA sees a side effect.
JAX may leave out a loop, a branch or an inner jit as a whole. So a call in such a program has an effect.

A token passes from each call of a program to the next call. The token makes XLA keep the calls in the order of the
source. This order is the same on all ranks, even if the rest of the ranks' programs differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax._src import effects
from jax.extend import core
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir, partial_eval

from multiring._frontend.process_sets import members_of
from multiring._frontend.requests.failures import noted_error
from multiring._frontend.requests.text import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER
from multiring.errors import ArgumentError, UnsupportedError
from multiring.jax.call import SMOOTH, CustomCall, result_shape, sets
from multiring.jax.devices import PLATFORMS
from multiring.jax.library import ATTRIBUTE, TARGET, target

# XLA runs a program of fewer than 1000 operations on the calling thread. JAX then raises the failure of a call as a
# ValueError. Computing a token of this size takes enough operations, so every failure is a JaxRuntimeError.
_FLOPS = 1024
_TANGENT, _GRADIENT = ".tangent", ".gradient"  # suffixes of a call's name for the calls of its derivatives

collective = core.Primitive("multiring")
collective.multiple_results = True


def bind(call: CustomCall, leaves: Sequence[Any]) -> Sequence[Any]:
    """Add `call` to the traced program, or run it, and return its results.

    The call runs at once if no program is traced. The inputs are the arrays `leaves`.

    Raises:
        ArgumentError: an array belongs to a trace that has ended.
    """
    target()
    try:
        arrays = [jax.numpy.asarray(leaf) for leaf in leaves]
        found: Sequence[Any] = collective.bind(*arrays, call=call, keeps=_is_nested())
    except jax.errors.UnexpectedTracerError as error:
        raise ArgumentError(
            "an array is from inside a function under jit, grad or vmap that has returned already: return the array "
            "from that function, and pass the returned array"
        ) from error
    return found


def _is_nested() -> bool:
    """Return whether the traced program is within another program."""
    depth = 0
    with core.take_current_trace() as innermost:
        trace: Any = innermost
        while trace is not None:
            depth += hasattr(trace, "frame")  # only the trace of a program has a frame of equations
            trace = getattr(trace, "parent_trace", None)
    return depth > 1


def _run(*arrays: Any, call: CustomCall, keeps: bool) -> Any:
    del keeps
    # XLA has one thread for programs per CPU, and a call that waits for other ranks holds a thread. Named calls may
    # come from several threads. Each of them runs on its calling thread, so that they do not wait for each other.
    called = replace(call, is_inline=bool(call.name))
    with jax.disable_jit(False):
        try:
            return _compiled(called)(*arrays)
        except ValueError as error:  # JAX raises the failure of a small program as a ValueError
            if noted_error(error) is None:
                raise
            raise jax.errors.JaxRuntimeError(str(error)) from None


collective.def_impl(_run)


@cache
def _compiled(call: CustomCall) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: collective.bind(*arrays, call=call, keeps=False))


@cache
def _effects() -> Any:
    """Return the effect of XLA's custom calls, which JAX allows in loops and branches."""
    found = jax.make_jaxpr(jax.ffi.ffi_call(TARGET, (), has_side_effect=True))().effects
    # JAX allows custom calls in loops and branches, but not in jax.checkpoint and custom derivatives. There is no
    # public way to allow them there. It is safe, because all ranks compute a call again in the same way.
    for each in found:
        for allowed in (effects.remat_allowed_effects, effects.custom_derivatives_allowed_effects):
            allowed.add_type(type(each))
    return found


def _results(*avals: Any, call: CustomCall, keeps: bool) -> Any:
    ranks = members_of(sets[call.process_set]).size
    found = [
        aval.update(shape=(1,) if call.shows else result_shape(call.collective, aval.shape, ranks), weak_type=False)
        for aval in avals
    ]
    return found, _effects() if keeps else core.no_effects


collective.def_effectful_abstract_eval(_results)


def _keep(_used: Sequence[bool], equation: Any) -> Any:
    """Keep the call and all its results, because the other ranks wait for the call."""
    return [True] * len(equation.invars), equation


partial_eval.dce_rules[collective] = _keep

# ---- in XLA's program ----


def _lower(context: Any, *operands: Any, call: CustomCall, keeps: bool) -> Any:
    del keeps
    axes = context.module_context.axis_context
    if getattr(axes, "num_devices", 1) > 1 or getattr(axes, "manual_axes", None):
        raise UnsupportedError(
            "a collective of multiring is in a program for several devices (pmap, shard_map and sharded jit make such "
            "programs), but each rank has one device. Start one rank per device (`multiring run -n`), and call the "
            "collective under a plain jit"
        )
    token = jax.typeof(np.zeros(1 if call.is_inline else _FLOPS, np.uint8))
    with_token = context.replace(avals_in=[*context.avals_in, token], avals_out=[*context.avals_out, token])
    lower = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)
    found = lower(with_token, *operands, _token_before() or _first_token(token), **{ATTRIBUTE: call.text})
    return found[:-1]


def _first_token(aval: Any) -> Any:
    """Return the token of the first call: a sum that XLA cannot compute at compile time."""
    zeros = mlir.ir_constant(np.zeros(aval.shape, aval.dtype))
    hidden: Any = stablehlo.optimization_barrier([zeros])
    return stablehlo.add(hidden, hidden)


def _token_before() -> Any:
    """Return the token of the previous call in the function that is being lowered, or None for the first call."""
    for operation in reversed(list(mlir.ir.InsertionPoint.current.block.operations)):
        if operation.name == "stablehlo.custom_call":
            name = mlir.ir.StringAttr(operation.attributes["call_target_name"]).value
            if name == TARGET:
                return operation.results[len(operation.results) - 1]
    return None


for _platform in PLATFORMS:
    mlir.register_lowering(collective, _lower, platform=_platform, cacheable=False)

# ---- derivatives: all collectives are linear, except reductions by Min, Max and Product ----


def _again(call: CustomCall, ending: str, **changes: Any) -> CustomCall:
    """Return the call of a derivative of `call`; `ending` is appended to its name."""
    name = call.name.removesuffix(_TANGENT) + ending if call.name else ""
    return replace(call, name=name, **changes)


def _push_forward(primals: Sequence[Any], tangents: Sequence[Any], *, call: CustomCall, keeps: bool) -> Any:
    if call.collective in {ALL_REDUCE, REDUCE_SCATTER} and call.op not in SMOOTH:
        raise UnsupportedError(
            f"an allreduce by {call.op} has no derivative: want Average or Sum, or jax.lax.stop_gradient of the array"
        )
    found = collective.bind(*primals, call=call, keeps=keeps)
    smooth = [number for number, each in enumerate(primals) if jax.numpy.issubdtype(each.dtype, jax.numpy.inexact)]
    paths = tuple(call.paths[number] for number in smooth if number < len(call.paths))
    again = _again(call, _TANGENT, paths=paths)
    inputs = [ad.instantiate_zeros(tangents[number]) for number in smooth]
    moved = iter(collective.bind(*inputs, call=again, keeps=keeps))
    return found, [
        next(moved) if number in smooth else ad.Zero(jax.typeof(each).to_tangent_aval())
        for number, each in enumerate(found)
    ]


ad.primitive_jvps[collective] = _push_forward


def _pull_back(cotangents: Sequence[Any], *_: Any, call: CustomCall, keeps: bool) -> Any:
    members = members_of(sets[call.process_set])
    gradients = [ad.instantiate_zeros(each) for each in cotangents]

    def of(**changes: Any) -> Any:
        return collective.bind(*gradients, call=_again(call, _GRADIENT, **changes), keeps=keeps)

    if call.collective == BROADCAST:
        average = of(collective=ALL_REDUCE, op="average")  # Horovod's meaning of a broadcast's gradient
        is_root = members.group.ranks[members.rank] == call.root
        return average if is_root else [jax.numpy.zeros_like(each) for each in average]
    if call.collective == ALL_GATHER:
        return of(collective=REDUCE_SCATTER, op="sum")
    if call.collective == REDUCE_SCATTER:
        gathered = of(collective=ALL_GATHER, op="")
        return gathered if call.op != "average" else [each / members.size for each in gathered]
    return of()


ad.primitive_transposes[collective] = _pull_back

# ---- vmap ----


def _map(arrays: Sequence[Any], dims: Sequence[Any], *, call: CustomCall, keeps: bool) -> Any:
    """Apply the call to arrays with a mapped dimension. The mapped dimension moves to the front, or behind the rows."""
    (size,) = {array.shape[dim] for array, dim in zip(arrays, dims, strict=True) if dim is not None}
    place = 1 if call.collective in {ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER} else 0
    whole = [
        batching.bdim_at_front(array, dim, size) if dim is None else jax.numpy.moveaxis(array, dim, 0)
        for array, dim in zip(arrays, dims, strict=True)
    ]
    if call.shows:
        return collective.bind(*whole, call=call, keeps=keeps), [None] * len(whole)
    placed = [jax.numpy.moveaxis(array, 0, place) for array in whole]
    return collective.bind(*placed, call=call, keeps=keeps), [place] * len(placed)


batching.primitive_batchers[collective] = _map
