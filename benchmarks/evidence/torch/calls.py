"""Run every call of torch.distributed and multiring.torch on random tensors.

The types and the layouts of the tensors are random. Every rank can draw the tensors of all ranks, so it computes the
expected result itself. A call may be refused only if it has no meaning, or if its result has no room.
"""

import functools
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.evidence.support.cases import Fault, Random
from benchmarks.evidence.torch.gradients import ready
from benchmarks.evidence.torch.tensors import (
    COMBINED,
    COMPLEX,
    FLOATS,
    INTEGERS,
    MOVED,
    SIGNED,
    Case,
    divided,
    drawn_shape,
    integers,
    is_same,
    plain,
    reduced,
)
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

import multiring.torch as mt

Compared = Iterator[tuple[Any, Any]]
Call = Callable[["Case", Random, Any], Compared]
OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}


class RefusedRightly(Exception):  # noqa: N818 -- nothing failed
    """Raised after multiring rightly refused a call without a meaning."""


def op_of(random: Random, kind: torch.dtype, *, ours: bool = False) -> str:
    """Draw an operation that is defined for a type."""
    names = ["sum", "average", "product", "min", "max", "and", "or", "xor"][: 5 if ours else 8]
    if kind in COMPLEX:
        names = ["sum", "average"]
    elif kind in FLOATS:
        names = names[:5]
    elif kind is torch.bool:
        names = [name for name in names if name != "average"]
    return names[int(random.integers(len(names)))]


def waited(work: Any) -> None:
    """Wait for `work`, which may be None."""
    if work is not None:
        work.wait()


# ---- torch.distributed ----


def all_reduce(case: Case, random: Random, group: Any) -> Compared:
    """Reduce one tensor, or several coalesced tensors."""
    op, shape = op_of(random, case.kind), drawn_shape(random)
    count = int(random.integers(1, 4)) if random.random() < 0.3 else 1
    own = [case.own(number, shape, overwritten=True) for number in range(count)]
    is_async = bool(random.integers(2))
    if count > 1:
        with _coalescing_manager(group, async_ops=is_async) as manager:
            for each in own:
                dist.all_reduce(each, OPS[op], group)
        if is_async:
            manager.wait()
    else:
        waited(dist.all_reduce(own[0], OPS[op], group, async_op=is_async))
    for number, each in enumerate(own):
        yield each, reduced(op, case.every(number, shape, overwritten=True))


def multiplied(case: Case, random: Random, group: Any) -> Compared:
    """Reduce with a factor (premultiplied sum), which only floats support."""
    shape, factor = drawn_shape(random), float(random.choice([0.5, 2.0, -1.0]))
    own = case.own(0, shape, overwritten=True)
    if not case.kind.is_floating_point:
        refuse(lambda: dist.all_reduce(own, _make_nccl_premul_sum(factor), group))
        return
    dist.all_reduce(own, _make_nccl_premul_sum(factor), group)
    yield own, reduced("sum", [each * factor for each in case.every(0, shape, overwritten=True)])


def reduce_to(case: Case, random: Random, group: Any) -> Compared:
    """Reduce a tensor to a random root."""
    op, shape, root = op_of(random, case.kind), drawn_shape(random), int(random.integers(len(case.ranks)))
    own = case.own(0, shape, overwritten=True)
    before = plain(own)
    waited(dist.reduce(own, op=OPS[op], group=group, group_dst=root, async_op=bool(random.integers(2))))
    yield own, reduced(op, case.every(0, shape, overwritten=True)) if case.here == root else before


def broadcast(case: Case, random: Random, group: Any) -> Compared:
    """Broadcast a tensor from a random root."""
    shape, root = drawn_shape(random), int(random.integers(len(case.ranks)))
    own = case.own(0, shape, overwritten=True)
    waited(dist.broadcast(own, group=group, group_src=root, async_op=bool(random.integers(2))))
    yield own, case.every(0, shape, overwritten=True)[root]


def all_gather(case: Case, random: Random, group: Any) -> Compared:
    """Gather into a list of tensors of even or uneven sizes.

    The destinations may be parts of one tensor, which may also hold the source.
    """
    ranks, shape = len(case.ranks), drawn_shape(random, least=1)
    shapes = [shape] * ranks
    if random.random() < 0.3:
        shapes = [(shape[0] + number, *shape[1:]) for number in range(ranks)]
    own = case.own(case.here, shapes[case.here])
    places = [case.place(number, each) for number, each in enumerate(shapes)]
    if len(set(shapes)) == 1 and random.random() < 0.3:
        whole = case.place(99, (ranks, *shape))
        places = list(whole.unbind())
        if random.random() < 0.5:
            with torch.no_grad():
                places[case.here].copy_(own)
            own = places[case.here]
    waited(dist.all_gather(places, own, group, async_op=bool(random.integers(2))))
    for number, each in enumerate(case.ranks):
        found = case.given(each, number, shapes[number])
        yield places[number], plain(found)


def gather_into(case: Case, random: Random, group: Any) -> Compared:
    """Gather into one tensor, concatenated or stacked, which may hold the source too."""
    ranks, shape = len(case.ranks), drawn_shape(random, least=1)
    is_stacked = bool(random.integers(2))
    place = case.place(0, (ranks, *shape) if is_stacked else (ranks * shape[0], *shape[1:]))
    own = case.own(0, shape)
    if random.random() < 0.3:
        part = place[case.here] if is_stacked else place[case.here * shape[0] : (case.here + 1) * shape[0]]
        with torch.no_grad():
            part.copy_(own)
        own = part
    waited(dist.all_gather_into_tensor(place, own, group, async_op=bool(random.integers(2))))
    every = case.every(0, shape)
    yield place, torch.stack(every) if is_stacked else torch.cat(every)


def reduce_scatter(case: Case, random: Random, group: Any) -> Compared:
    """Reduce and scatter a list of tensors, or one tensor."""
    ranks, op = len(case.ranks), op_of(random, case.kind)
    shape = drawn_shape(random, least=1)
    is_async = bool(random.integers(2))
    if random.random() < 0.5:
        sources = [case.own(number, shape) for number in range(ranks)]
        place = case.place(0, shape)
        waited(dist.reduce_scatter(place, sources, OPS[op], group, async_op=is_async))
        yield place, reduced(op, case.every(case.here, shape))
        return
    whole = (ranks * shape[0], *shape[1:])
    own, place = case.own(0, whole), case.place(0, shape)
    wanted = reduced(op, case.every(0, whole))[case.here * shape[0] : (case.here + 1) * shape[0]]
    waited(dist.reduce_scatter_tensor(place, own, OPS[op], group, async_op=is_async))
    yield place, wanted


def reduce_scatter_within(case: Case, random: Random, group: Any) -> Compared:
    """Reduce and scatter one tensor into a part of itself."""
    ranks, op, shape = len(case.ranks), op_of(random, case.kind), drawn_shape(random, least=1)
    whole = (ranks * shape[0], *shape[1:])
    own = case.own(0, whole, overwritten=True)
    wanted = reduced(op, case.every(0, whole, overwritten=True))
    at = int(random.integers(ranks))
    place = own[at * shape[0] : (at + 1) * shape[0]]
    dist.reduce_scatter_tensor(place, own, OPS[op], group)
    yield place, wanted[case.here * shape[0] : (case.here + 1) * shape[0]]


def all_to_all(case: Case, random: Random, group: Any) -> Compared:
    """Exchange lists of tensors of any sizes."""
    ranks = len(case.ranks)
    behind = drawn_shape(random)[:2]
    # the rows that each source rank (first index) sends to each destination rank
    rows = random.integers(0, 4, (ranks, ranks))

    def number(source: int, target: int) -> int:
        return 10 * source + target

    sources = [case.own(number(case.here, each), (int(rows[case.here, each]), *behind)) for each in range(ranks)]
    places = [case.place(each, (int(rows[each, case.here]), *behind)) for each in range(ranks)]
    waited(dist.all_to_all(places, sources, group, async_op=bool(random.integers(2))))
    for each, rank in enumerate(case.ranks):
        shape = (int(rows[each, case.here]), *behind)
        yield places[each], plain(case.given(rank, number(each, case.here), shape))


def all_to_all_single(case: Case, random: Random, group: Any) -> Compared:
    """Exchange parts of one tensor, in even or uneven cuts."""
    ranks, behind = len(case.ranks), drawn_shape(random)[:2]
    is_even = bool(random.integers(2))
    rows = np.full((ranks, ranks), int(random.integers(3))) if is_even else random.integers(0, 4, (ranks, ranks))
    shapes = [(int(each.sum()), *behind) for each in rows]
    own = case.own(case.here, shapes[case.here])
    place = case.place(0, (int(rows[:, case.here].sum()), *behind))
    into, out_of = (None, None) if is_even else (rows[:, case.here].tolist(), rows[case.here].tolist())
    waited(dist.all_to_all_single(place, own, into, out_of, group=group, async_op=bool(random.integers(2))))
    parts = []
    for each, rank in enumerate(case.ranks):
        begin = int(rows[each, : case.here].sum())
        parts.append(plain(case.given(rank, each, shapes[each]))[begin : begin + int(rows[each, case.here])])
    yield place, torch.cat(parts)


def gather_scatter(case: Case, random: Random, group: Any) -> Compared:
    """Gather to a random root, then scatter from it."""
    ranks, shape, root = len(case.ranks), drawn_shape(random), int(random.integers(len(case.ranks)))
    own, is_root = case.own(0, shape), case.here == root
    places = [case.place(number, shape) for number in range(ranks)] if is_root else None
    waited(dist.gather(own, places, group=group, group_dst=root, async_op=bool(random.integers(2))))
    yield from zip(places or (), case.every(0, shape), strict=False)
    sources = [case.own(10 + number, shape) for number in range(ranks)] if is_root else None
    place = case.place(50, shape)
    waited(dist.scatter(place, sources, group=group, group_src=root, async_op=bool(random.integers(2))))
    yield place, plain(case.given(case.ranks[root], 10 + case.here, shape))


def messages(case: Case, random: Random, group: Any) -> Compared:
    """Send messages around a ring, with one of three kinds of calls."""
    ranks, shape, form = len(case.ranks), drawn_shape(random), int(random.integers(3))
    own, place = case.own(0, shape), case.place(0, shape)
    after, before = (case.here + 1) % ranks, (case.here - 1) % ranks
    if ranks == 1:
        return
    if form == 0:
        steps = [
            dist.P2POp(dist.isend, own, group=group, group_peer=after),
            dist.P2POp(dist.irecv, place, group=group, group_peer=before),
        ]
        for each in dist.batch_isend_irecv(steps):
            each.wait()
    elif form == 1:
        sent = dist.isend(own, group=group, group_dst=after, tag=7)
        waited(dist.irecv(place, group=group, group_src=before, tag=7))
        waited(sent)
    elif case.here % 2:
        dist.recv(place, group=group, group_src=before)
        dist.send(own, group=group, group_dst=after)
    else:
        dist.send(own, group=group, group_dst=after)
        dist.recv(place, group=group, group_src=before)
    yield place, case.every(0, shape)[before]


def functional_calls(case: Case, random: Random, group: Any) -> Compared:
    """Run torch's functional collectives, which return new tensors."""
    ranks, op, shape = len(case.ranks), op_of(random, case.kind), drawn_shape(random, least=1)
    # The inputs are plain tensors, because these collectives return a tensor subclass themselves.
    own, every = case.own(0, shape).as_subclass(Tensor), case.every(0, shape)
    name = {"average": "avg", "and": "band", "or": "bor", "xor": "bxor"}.get(op, op)
    yield functional.all_reduce(own, name, group).clone(), reduced(op, every)
    yield functional.all_gather_tensor(own, 0, group).clone(), torch.cat(every)
    whole = (ranks * shape[0], *shape[1:])
    found = functional.reduce_scatter_tensor(case.own(1, whole).as_subclass(Tensor), name, 0, group).clone()
    wanted = reduced(op, case.every(1, whole))[case.here * shape[0] : (case.here + 1) * shape[0]]
    yield found, wanted
    yield functional.broadcast(own, 0, group).clone(), every[0]


def objects(case: Case, random: Random, group: Any) -> Compared:
    """Gather and broadcast objects that contain tensors."""
    shape, root = drawn_shape(random), int(random.integers(len(case.ranks)))
    own, every = case.own(0, shape), case.every(0, shape)
    if own.is_inference() or (own.requires_grad and not own.is_leaf):
        own = plain(own)  # pickle takes only leaf tensors outside inference mode
    found: list[Any] = [None] * len(every)
    dist.all_gather_object(found, {"x": own}, group)
    yield from zip((each["x"] for each in found), every, strict=True)
    sent: list[Any] = [own, "text"] if case.here == root else [None, None]
    dist.broadcast_object_list(sent, group=group, group_src=root)
    yield sent[0], every[root]


# ---- multiring.torch ----

OURS: dict[str, Any] = {"sum": mt.Sum, "average": mt.Average, "product": mt.Product, "min": mt.Min, "max": mt.Max}


def reduced_scaled(op: str, parts: list[Tensor], before: float, after: float) -> Tensor:
    """Return the reduction with Horovod's factors.

    It is exact if the factors are powers of two.
    """
    kind = parts[0].dtype
    if kind in FLOATS or kind in COMPLEX:
        return reduced(op, [each * before for each in parts]) * after
    first, last = Fraction(before), Fraction(after)

    def times(whole: Any, factor: Fraction) -> Any:
        return divided(whole * factor.numerator, factor.denominator)

    scaled = [integers(times(plain(each).numpy().astype(object), first), kind) for each in parts]
    if op == "average":
        total = functools.reduce(lambda a, b: a + b, [each.numpy().astype(object) for each in scaled])
        return integers(times(np.asarray(total, object), last / len(parts)), kind)
    return integers(times(np.asarray(reduced(op, scaled).numpy().astype(object)), last), kind)


def our_allreduce(case: Case, random: Random, _group: Any) -> Compared:
    """Run a random form of multiring's allreduce, with random factors."""
    op, shape, form = op_of(random, case.kind, ours=True), drawn_shape(random), int(random.integers(5))
    before, after = 1.0, 1.0
    if case.kind is not torch.bool and op in {"sum", "average"} and random.random() < 0.5:
        before, after = (float(each) for each in random.choice([0.5, 1.0, 2.0], 2))
    options: dict[str, Any] = {"op": OURS[op], "prescale_factor": before, "postscale_factor": after}
    in_place = form in {1, 4}
    own = case.own(0, shape, overwritten=in_place)
    wanted = reduced_scaled(op, case.every(0, shape, overwritten=in_place), before, after)
    if form == 0:
        yield mt.allreduce(own, **options), wanted
    elif form == 1:
        with torch.no_grad():
            yield mt.allreduce_(own, **options), wanted
        yield own, wanted
    elif form == 2:
        yield mt.synchronize(mt.allreduce_async(own, **options)), wanted
    elif form == 3:
        for found in mt.grouped_allreduce([own, own], **options):
            yield found, wanted
    else:
        other = case.own(1, shape, overwritten=True)
        with torch.no_grad():
            mt.grouped_allreduce_([own, other], **options)
        yield own, wanted
        yield other, reduced_scaled(op, case.every(1, shape, overwritten=True), before, after)


def our_moves(case: Case, random: Random, _group: Any) -> Compared:
    """Run multiring's calls that move tensors of any type."""
    ranks, shape, root = len(case.ranks), drawn_shape(random, least=1), int(random.integers(len(case.ranks)))
    shapes = [(shape[0] + number, *shape[1:]) for number in range(ranks)]
    own = case.own(case.here, shapes[case.here])
    yield mt.allgather(own), torch.cat([plain(case.given(each, n, shapes[n])) for n, each in enumerate(case.ranks)])
    yield mt.broadcast(case.own(7, shape), root), case.every(7, shape)[root]
    place = case.own(8, shape, overwritten=True)
    with torch.no_grad():
        mt.broadcast_(place, root)
    yield place, case.every(8, shape, overwritten=True)[root]
    whole = (ranks * shape[0], *shape[1:])
    parts = [each[case.here * shape[0] : (case.here + 1) * shape[0]] for each in case.every(9, whole)]
    yield mt.alltoall(case.own(9, whole)), torch.cat(parts)


def our_reducescatter(case: Case, random: Random, _group: Any) -> Compared:
    """Reduce and scatter rows by sum or average with multiring's reducescatter."""
    ranks, shape = len(case.ranks), drawn_shape(random, least=1)
    op = "sum" if case.kind is torch.bool or random.random() < 0.4 else "average"
    own, whole = case.own(0, shape), reduced(op, case.every(0, shape))
    begins = [sum(shape[0] // ranks + (each < shape[0] % ranks) for each in range(upto)) for upto in range(ranks + 1)]
    yield mt.reducescatter(own, op=OURS[op]), whole[begins[case.here] : begins[case.here + 1]]


def our_sparse(case: Case, random: Random, group: Any) -> Compared:
    """Reduce sparse tensors with multiring's call and with torch's."""
    shape = (int(random.integers(1, 5)), int(random.integers(1, 4)))
    op = "sum" if case.kind is torch.bool or random.random() < 0.5 else "average"
    every = case.every(0, shape)
    own = every[case.here].to_sparse()
    if case.kind in COMPLEX and random.random() < 0.3:
        own, every = own.conj(), [each.conj().resolve_conj() for each in every]
    wanted = reduced(op, every)
    if random.random() < 0.5:
        yield mt.allreduce(own, op=OURS[op]).to_dense(), wanted
    else:
        dist.all_reduce(own, OPS[op], group)
        yield own.to_dense(), wanted


# ---- calls that must be refused ----


def refuse(call: Callable[[], Any]) -> None:
    """Make a call that must be refused with a meaningful message."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        if len(str(error)) < 20:
            raise AssertionError(f"refused without words: {error!r}") from error
        raise RefusedRightly from error
    raise AssertionError("taken without a word")


def no_place(case: Case, random: Random, group: Any) -> Compared:
    """Reduce into tensors without room for the result.

    Several of their elements share memory.
    """
    length = int(random.integers(2, 5))
    base = torch.ones(length + 2).to(case.kind)
    places = [base[:1].expand(length), base.as_strided((length, 2), (1, 1)), base[:1].expand(2, length).t()]
    place = places[int(random.integers(len(places)))]
    own = torch.ones(place.shape).to(case.kind)
    lists = [place, place.clone()] * len(case.ranks)
    calls: list[Callable[[], Any]] = [
        lambda: dist.broadcast(place, group=group, group_src=(case.here + 1) % len(case.ranks)),
        lambda: dist.all_gather(lists[: len(case.ranks)], own, group),
        lambda: dist.all_reduce(place, group=group),
    ]
    yield from ()
    refuse(calls[int(random.integers(1, len(calls)) if len(case.ranks) == 1 else random.integers(len(calls)))])


CALLS: dict[str, tuple[Call, tuple[torch.dtype, ...]]] = {
    "all_reduce": (all_reduce, COMBINED),
    "all_reduce of multiples": (multiplied, (*FLOATS, *SIGNED)),
    "reduce": (reduce_to, COMBINED),
    "broadcast": (broadcast, (*COMBINED, *MOVED)),
    "all_gather": (all_gather, (*COMBINED, *MOVED)),
    "all_gather_into_tensor": (gather_into, (*COMBINED, *MOVED)),
    "reduce_scatter": (reduce_scatter, COMBINED),
    "reduce_scatter within": (reduce_scatter_within, COMBINED),
    "all_to_all": (all_to_all, (*COMBINED, *MOVED)),
    "all_to_all_single": (all_to_all_single, (*COMBINED, *MOVED)),
    "gather, scatter": (gather_scatter, (*COMBINED, *MOVED)),
    "messages": (messages, (*COMBINED, *MOVED)),
    "functional": (functional_calls, COMBINED),
    # torch pickles only these types in all its versions
    "objects": (objects, (*FLOATS, *COMPLEX, *SIGNED, torch.bool)),
    "mt.allreduce": (our_allreduce, COMBINED),
    "mt.allgather, broadcast, alltoall": (our_moves, (*COMBINED, *MOVED)),
    "mt.reducescatter": (our_reducescatter, COMBINED),
    "sparse": (our_sparse, (torch.float32, torch.float64, torch.bfloat16, *COMPLEX, *SIGNED, torch.uint8)),
    "no place": (no_place, (*FLOATS, *INTEGERS)),
}


@functools.cache
def groups() -> tuple[tuple[Any, tuple[int, ...]], ...]:
    """Return the groups of the cases: all ranks twice, and this rank alone."""
    rank, ranks = ready()
    everyone = tuple(range(ranks))
    alone = [dist.new_group([each]) for each in everyone]
    return (None, everyone), (dist.new_group(list(everyone)), everyone), (alone[rank], (rank,))


def calls(random: Random, _folder: Path) -> Iterator[Fault]:
    """Make ten random calls, each with tensors of one type and of random layouts."""
    rank, _ = ready()
    names = sorted(CALLS)
    for _ in range(10):
        name = names[int(random.integers(len(names)))]
        call, kinds = CALLS[name]
        kind = kinds[int(random.integers(len(kinds)))]
        known = groups()
        group, members = known[int(random.integers(len(known)))] if not name.startswith(("mt", "sparse")) else known[0]
        entropy, is_wide = int(random.integers(1 << 30)), bool(random.integers(2))
        case = Case(entropy, kind, members, rank, is_wide=is_wide, is_ours=name.startswith("mt"))
        try:
            for found, wanted in call(case, np.random.default_rng(entropy), group or dist.group.WORLD):
                if not is_same(found, wanted):
                    yield Fault(f"calls: {name}", f"{kind}, {case.notes}: {found} for {wanted}")
        except RefusedRightly:
            pass
        except Exception as error:  # noqa: BLE001 -- any error is a finding
            yield Fault(f"calls: {name}: {type(error).__name__}", f"{kind}, {case.notes}: {error}")
            return  # stop, because the ranks may be out of step
        for layout in case.spoilt():
            yield Fault(f"calls: {name} writes beside", f"{kind}, {layout}, {case.notes}")
