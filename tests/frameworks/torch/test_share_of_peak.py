"""Reports of the share of peak: FLOP counts, and time that does not count."""

import pytest
import torch
from tests.support.plain import join
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multiring.torch as mt
from multiring.errors import ArgumentError, StateError
from multiring.torch.reporting.share_of_peak import TrainingReport, measured_peak, training_flop


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(8, 16)).sum()
    return loss


def test_flop_are_those_of_the_products() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    forward = 2 * 8 * (16 * 32 + 32 * 4)
    # The backward pass has both products for the second layer, and only the weights' product for the first.
    backward = 2 * 8 * (16 * 32 + 2 * 32 * 4)
    assert training_flop(model, loss_of) == forward + backward
    assert all(each.grad is None for each in model.parameters())
    with pytest.raises(ArgumentError, match="returned no loss"):
        training_flop(model, lambda plain: plain(torch.ones(1, 16)).detach())
    with pytest.raises(ArgumentError, match="knows none of the operations"):
        training_flop(nn.PReLU(), lambda plain: plain(torch.ones(1, 16)).sum())


def test_flop_are_counted_of_shapes_and_of_a_step_that_needs_values() -> None:
    seen: list[int] = []

    class Layer(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(self.weight.untyped_storage().data_ptr() if type(self.weight.data) is Tensor else 0)
            return super().forward(inputs)

    model = nn.Sequential(nn.BatchNorm1d(16), Layer(16, 32))
    flop = training_flop(model, loss_of)
    assert seen == [0]  # the layer saw tensors without values
    assert model[0].num_batches_tracked == 0
    assert training_flop(model, lambda plain: plain(torch.ones(8, 16))[torch.ones(8) > 0].sum()) == flop
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        training_flop(model[1], lambda plain: plain(torch.ones(1, 17)).sum())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_flop_computed_once_more_do_not_count(*, is_reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, inputs, use_reentrant=is_reentrant)
            return found

    layers = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)

    def flop_of(model: nn.Module) -> int:
        return training_flop(model, lambda plain: plain(torch.ones(8, 16, requires_grad=True)).sum())

    assert flop_of(Checkpointed(*layers)) == flop_of(nn.Sequential(*layers)) == 3 * 2 * 8 * (16 * 32 + 32 * 4)


def test_flop_of_a_gradient_that_is_differentiated_count() -> None:
    def penalised(plain: nn.Module) -> Tensor:
        inputs = torch.ones(8, 16, requires_grad=True)
        (slope,) = torch.autograd.grad(plain(inputs).sum(), inputs, create_graph=True)
        return slope.square().sum()

    # The products are the forward product, the product of its gradient, and the products of the gradient's gradients.
    product = 2 * 8 * 16 * 4
    assert training_flop(nn.Linear(16, 4), penalised) >= 3 * product


def test_peaks_are_measured_on_this_machine() -> None:
    found = measured_peak(sizes=(32, 64), channels=8, seconds=0.001)
    assert list(found) == ["matrix 32", "matrix 64", "convolution 8"]
    assert min(found.values()) > 1e6
    with pytest.raises(ArgumentError, match="dtype='int8'"):
        measured_peak("int8")


def test_report_of_ranks() -> None:
    assert len(set(run_ranks(report_on, 2))) == 1


def report_on(here: Here) -> str:
    join(here)
    model = nn.Linear(16, 4)
    peaks = iter([{"matrix 8": 1e9, "convolution 8": 2e9}, {"matrix 8": 3e9}, {"matrix 8": 1e9}])
    now = [100.0]

    def measure() -> dict[str, float]:
        now[0] += 7.0
        return next(peaks)

    report = TrainingReport(training_flop(model, loss_of) / 8, "float32", measure, lambda: now[0])
    for _ in range(10):
        report.count(5)
        now[0] += 0.2
    report.measure_peak()
    with report.paused():
        now[0] += 50.0
    now[0] += float(here.rank)  # the ranks end at different times
    found = report.finish()
    assert (found.samples, found.ranks, found.peaks, found.peak) == (100, 2, (4e9, 6e9, 2e9), 6e9)
    assert found.seconds == pytest.approx(3.0)
    assert found.flop == 100 * 2 * (2 * 16 * 4)
    assert found.share == pytest.approx(found.flop / 3.0 / 6e9)
    assert "100 samples in 3.0 s on 2 ranks: 33.3 a second" in str(found)
    return str(found)


def test_report_refuses() -> None:
    with pytest.raises(ArgumentError, match="samples=0"):
        mt.training_report(nn.Linear(16, 4), loss_of, samples=0)
    report = mt.training_report(nn.Linear(16, 4), loss_of, samples=8, measure=lambda: {"matrix 8": 1e9})
    with pytest.raises(StateError, match="no samples"):
        report.finish()
    with report.paused(), pytest.raises(StateError, match="within paused"), report.paused():
        pass


def counted(model: nn.Module, *given: Tensor) -> int:
    def step(plain: nn.Module) -> Tensor:
        found = plain(*given)
        return (found[0] if isinstance(found, tuple) else found).sum()  # type: ignore[no-any-return] # a tensor

    return training_flop(model, step)


@pytest.mark.parametrize("seed", range(6))
def test_flop_of_random_layers_are_those_of_the_published_formulas(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    size = [int(each) for each in torch.randint(2, 7, (6,), generator=draw)]
    rows, steps, width, groups = size[0], size[1] + 4, 8 * size[2], size[3]
    # Every layer except the first also computes its input's gradient, so its backward pass has 2 products.
    given = torch.randn(rows, steps, width)
    assert counted(nn.LSTM(width, 16, batch_first=True), given) == 3 * 2 * rows * steps * (width + 16) * 4 * 16
    channels = groups * 4
    image = torch.randn(rows, channels, 9, 9)
    first = nn.Conv2d(channels, channels, 1, bias=False)
    grouped = nn.Conv2d(channels, 2 * channels, 3, groups=groups, bias=False)
    wanted = 2 * 2 * rows * 81 * channels**2 + 3 * 2 * rows * 49 * 2 * channels * (channels // groups) * 9
    assert counted(nn.Sequential(first, grouped), image) == wanted
    turned = nn.ConvTranspose2d(channels, 2 * channels, 3, groups=groups, bias=False)
    wanted = 2 * 2 * rows * 81 * channels**2 + 3 * 2 * rows * 81 * 2 * channels * (channels // groups) * 9
    assert counted(nn.Sequential(first, turned), image) == wanted
    heads = Heads(width, size[4])
    assert counted(heads, given) == 2 * 2 * rows * steps * width * 3 * width + 3 * 4 * rows * steps**2 * width


class Heads(nn.Module):
    """Attention with one projection; its input needs no gradient."""

    def __init__(self, width: int, causal: int) -> None:
        super().__init__()
        self.project, self.is_causal = nn.Linear(width, 3 * width), causal > 3

    def forward(self, given: Tensor) -> Tensor:
        query, key, value = self.project(given).view(*given.shape[:2], 3, 8, -1).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
