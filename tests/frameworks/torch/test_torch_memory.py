"""Ranks share gradients even if a program replaces a gradient or its memory."""

import warnings
from collections.abc import Callable

import torch
from tests.support.plain import backward, enter
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring.torch.interop import apart, is_same_memory, touches

STEPS = 4

Change = Callable[[nn.Module], object]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def each_gradient(change: Callable[[nn.Parameter, Tensor], object]) -> Change:
    def changed(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter, parameter.grad)

    return changed


def transpose(parameter: nn.Parameter, gradient: Tensor) -> None:
    if gradient.dim() == 2 and gradient.size(0) == gradient.size(1):
        parameter.grad = gradient.t()


def clamp(_parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.data = gradient.data.clamp(-0.05, 0.05)


def turn_strides(_parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.data = gradient.data.t().contiguous().t()


def set_half(_parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.set_((gradient * 0.5).untyped_storage(), 0, gradient.shape, gradient.contiguous().stride())


def replace(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient * 0.5


def replace_by_view(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.view_as(gradient)


def share(tensor: Tensor) -> None:
    tensor.share_memory_()  # type: ignore[no-untyped-call] # torch has no type for it


def replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def there_and_back(model: nn.Module) -> None:
    model.bfloat16().float()


# Changes that programs make to gradients. Changes of values come before the step, like clipping.
CHANGES: dict[str, Change] = {
    "data assigned": each_gradient(clamp),
    "data assigned, other strides": each_gradient(turn_strides),
    "set_": each_gradient(set_half),
    "replaced": each_gradient(replace),
    "replaced by a view of itself": each_gradient(replace_by_view),
    "transposed in its place": each_gradient(transpose),
    "gradient shared": each_gradient(lambda _, g: share(g)),
    "model shared": lambda model: model.share_memory(),
    "bfloat16 and back": there_and_back,
    "parameter's data replaced": replace_data,
    "changed in place": each_gradient(lambda _, g: g.mul_(0.5)),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, change: Change, ranks: range, *, to_none: bool) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        drawn = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
        backward(model(torch.cat(drawn)).square().mean())
        if step % 2:
            change(model)
        optimizer.step()


def share_whatever_is_done(here: Here) -> None:
    enter()
    warnings.filterwarnings("ignore", "grad and param do not obey")  # torch warns about strides that a program chose
    for name, change in CHANGES.items():
        for to_none in (True, False):
            model, alone = network(), network()
            shared = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
            train(model, shared, change, range(here.rank, here.rank + 1), to_none=to_none)
            train(alone, torch.optim.SGD(alone.parameters(), 0.1), change, range(here.size), to_none=to_none)
            sums = mt.allgather(torch.stack([each.detach().sum() for each in model.parameters()])[None])
            assert torch.equal(sums[0], sums[1]), f"{name}, set_to_none={to_none}: ranks differ"
            # 16-bit types enlarge a rank's rounding errors.
            most = 2e-2 if "16" in name else 1e-5
            for own, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                assert (own - wanted).abs().max() <= most, f"{name}, set_to_none={to_none}: differs from one process"


def test_ranks_share_gradients_whatever_memory_they_are_given() -> None:
    run_ranks(share_whatever_is_done, 2)


def test_memory_is_compared_and_not_objects() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert is_same_memory(x, x.view(3, 4))
    for other in (x.clone(), x[:2], x.view(4, 3), x.t(), x.view(torch.int32), x.to_sparse()):
        assert not is_same_memory(x, other)
    own = x.detach()
    own.data = x.data.clone()
    assert not is_same_memory(x, own)
    z = torch.ones(2, dtype=torch.complex64)
    assert not is_same_memory(z, z.conj())
    assert touches(x, x.t())
    assert not touches(x[:1], x[1:])


def test_a_place_stays_where_it_is_when_what_was_handed_out_moves() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float64):
        memory = torch.ones(12, dtype=dtype)
        place = memory.as_strided((2, 3), (1, 2), 3)
        out = apart(place)
        assert is_same_memory(out, place)
        share(out)
        assert not is_same_memory(out, place)
        assert place.data_ptr() == memory[3:].data_ptr()
        assert apart(torch.empty(0, dtype=dtype)).numel() == 0


def wait_for_what_is_copied(_here: Here) -> None:
    """Lag keeps a copy of a gradient whose memory its owner overwrites."""
    enter()
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], 1.0)
    mt.gradient_lag(optimizer)
    memory = torch.zeros(3)
    seen = []
    for step in range(1, 4):
        weight.grad = memory.fill_(float(step))
        optimizer.step()
        seen.append(-float(weight.detach()[0]))
    assert seen == [0, 1, 3]


def test_lag_keeps_a_gradient_that_its_owner_overwrites() -> None:
    run_ranks(wait_for_what_is_copied, 1)


def test_averages_follow_the_buffers_that_a_model_has_now() -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    average = mt.moving_average(optimizer, model, decay=0.5)
    model.double().float()  # replaces the buffers' tensors
    assert model.running_mean is not None
    model.running_mean += 2.0
    backward(model(torch.randn(3, 2)).sum())
    now = model.running_mean.clone()
    optimizer.step()
    with average.applied():
        assert torch.equal(model.running_mean, now / 2)
