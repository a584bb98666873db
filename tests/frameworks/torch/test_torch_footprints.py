"""Layouts of tensor groups in the native core, and the changes that it notices."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.support.plain import enter
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring._frontend.process_sets import members_of
from multiring.torch.fusion_buffer import Packing
from multiring.torch.layout_cache import PlainTensorLayout, tensor_layout_of

WHOLE = torch.zeros(100)
ALIKE: dict[str, list[Tensor]] = {
    "in one memory": [WHOLE[:10], WHOLE[16:32].view(4, 4), WHOLE[32:32]],
    "parameters": [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))],
    "bfloat16": [torch.ones(3, dtype=torch.bfloat16)],
    "bool": [torch.ones(3, dtype=torch.bool), torch.ones(1, dtype=torch.bool)],
    "float8": [torch.zeros(4, dtype=torch.float8_e4m3fn)],
    "uint16": [torch.ones(2, dtype=torch.uint16)],
    "scalar": [torch.tensor(1.0)],
    "empty": [torch.empty(0), torch.empty(3, 0)],
    "sizes of one": [torch.ones(3, 2)[:1, :1]],
    "with a history": [nn.Parameter(torch.ones(3)) * 2],
}
OTHER: dict[str, list[object]] = {
    "gaps": [torch.ones(3, 2)[:, 0]],
    "by columns": [torch.ones(2, 3).T],
    "two types": [torch.ones(1), torch.ones(1, dtype=torch.float64)],
    "meta": [torch.ones(2, device="meta")],
    "sparse": [torch.eye(2).to_sparse()],
    "no tensor": [torch.ones(1), None],
}


@pytest.mark.parametrize("name", ALIKE)
def test_footprints_of_tensors_alike(name: str) -> None:
    tensors = ALIKE[name]
    found = tensor_layout_of(tensors)
    plain = PlainTensorLayout.of(tensors)
    assert found is not None
    assert plain is not None
    for each in (found, plain):
        assert each.address == tensors[0].data_ptr()
        assert each.is_of(tensors)
        assert each.is_of(tuple(tensors))
        assert not each.is_of(tensors[1:])
        assert not each.is_of([tensor.detach() for tensor in tensors])  # detached tensors are other objects


@pytest.mark.parametrize("name", OTHER)
def test_tensors_that_have_no_footprint(name: str) -> None:
    assert tensor_layout_of(OTHER[name]) is None  # type: ignore[arg-type] # the wrong types are the point
    assert PlainTensorLayout.of(OTHER[name]) is None  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "other memory": lambda tensor: tensor.set_(torch.zeros(4, 4)),  # type: ignore[call-overload] # torch accepts it
    "another shape": lambda tensor: tensor.unsqueeze_(0),
    "fewer elements": lambda tensor: tensor.resize_(2, 4),
    "another order": lambda tensor: tensor.t_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_has_changed(change: str) -> None:
    for of in (tensor_layout_of, PlainTensorLayout.of):
        tensors = [torch.zeros(3), torch.arange(16.0).view(4, 4)]
        found = of(tensors)
        assert found is not None
        CHANGES[change](tensors[1])
        assert not found.is_of(tensors)


def test_forms() -> None:
    first, second = torch.zeros(64), torch.zeros(64)
    for of in (tensor_layout_of, PlainTensorLayout.of):
        forms = [of([whole[:3], whole[16:]]) for whole in (first, second)]
        others = [of([first[:3], first[32:48]]), of([first[:4], first[16:]]), of([first[:3].int(), first[16:].int()])]
        assert len({each.form for each in forms if each is not None}) == 1
        assert len({each.form for each in (*forms, *others) if each is not None}) == 4


def test_groups_that_come_again() -> None:
    run_ranks(come_again, 2)


def come_again(here: Here) -> None:
    enter()
    shapes = [(3, 5), (7,), (), (1000,), (64, 64)]
    own = mt.shared_zeros_like([torch.empty(shape) for shape in shapes])

    def reduce(turn: int, **options: object) -> None:
        for tensor in own:
            tensor.fill_(here.rank + turn)
        found = mt.grouped_allreduce_(own, **{"op": mt.Sum, "name": "again", **options})  # type: ignore[arg-type]
        assert all(one is other for one, other in zip(found, own, strict=True))
        total = 2 * turn + 1
        wanted = total if options.get("op", mt.Sum) == mt.Sum else total / 2
        assert all(bool((tensor == wanted).all()) for tensor in own)

    for turn in range(4):
        reduce(turn)
        reduce(turn, op=mt.Average)
        reduce(turn, name="by another name")
        reduce(turn, name=None)
    for number in range(20):  # more names than multiring keeps
        reduce(1, name=f"name {number}")
    for _ in range(2):
        for tensor in own:
            tensor.fill_(1.0)
        mt.synchronize(mt.grouped_allreduce_async_(own, name="again", op=mt.Sum))
        assert own[0].tolist() == [[2.0] * 5] * 3

    # autograd notices the in-place reduction, with a repeated name and without a name.
    weight = torch.ones(7, requires_grad=True)
    for name in ("again", None):
        product = (own[1] * weight).sum()
        mt.grouped_allreduce_(own, name=name, op=mt.Sum)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()  # type: ignore[no-untyped-call] # torch has no type for it


def test_groups_that_come_again_otherwise() -> None:
    run_ranks(come_again_otherwise, 2)


def come_again_otherwise(here: Here) -> None:
    enter()
    own = mt.shared_zeros_like([torch.empty(3, 5), torch.empty(7), torch.empty(()), torch.empty(1000)])
    packing = members_of(mt.global_process_set).kept(Packing)

    def reduce(turn: int) -> None:
        for tensor in own:
            tensor.fill_(here.rank + turn)
        mt.grouped_allreduce_(own, op=mt.Sum, name="again")
        assert all(bool((tensor == 2 * turn + 1).all()) for tensor in own)

    reduce(0)
    reduce(1)
    # After equal calls, the ranks' groups differ under the same name: all ranks get an error, and later calls work.
    with pytest.raises(mt.HorovodInternalError, match="Mismatched"):
        mt.grouped_allreduce_(own[: 3 + here.rank], name="again", op=mt.Sum)
    reduce(2)
    order = ("again", "by another name")
    handles = [
        mt.grouped_allreduce_async_(mt.shared_zeros_like(own), name=name) for name in order[:: 1 - 2 * here.rank]
    ]
    for handle in handles:
        mt.synchronize(handle)
    for turn in range(3):  # from now on, each call negotiates
        reduce(turn)

    # Tensors are replaced one by one; the shared memory is freed with the last of them.
    span = packing.known_span(own)
    assert span is not None
    own[2] = own[2].detach()
    assert packing.known_span(own) is None
    reduce(3)
    reduce(4)
    memory = weakref.ref(span.memory)
    del span
    own.clear()
    gc.collect()
    assert memory() is None


def test_a_group_that_came_once_is_let_go_with_its_first_tensor_and_one_that_came_again_with_any() -> None:
    for came_again in (False, True):
        whole = torch.zeros(48)
        own = [whole[start : start + 16] for start in (0, 16, 32)]
        del whole
        packing = Packing()
        span = packing.span_of(own)
        assert span is not None
        memory = weakref.ref(span.memory)
        del span
        if came_again:
            assert packing.known_span(own) is not None
        del own[2]
        assert (memory() is None) == came_again
        own.clear()
        assert memory() is None
