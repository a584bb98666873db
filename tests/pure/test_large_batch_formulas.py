"""Formulas of large-batch training, compared with known results."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from multiring._gradients.loss_scale import LossScale
from multiring._gradients.trust_ratios import lamb_ratios, larc_ratios, lars_ratios
from multiring.convergence.adascale import AdaScale, adascale_gain
from multiring.convergence.convergence_concerns import Facts, concerns
from multiring.convergence.critical_batch import Law, fit_critical_batch_size, recommend_batch_size
from multiring.convergence.noise_scale import ConfidenceInterval, NoiseSample, NoiseScale, block_bootstrap, noise_sample
from multiring.convergence.rate_schedules import (
    Constant,
    Cosine,
    GrowingBatch,
    Polynomial,
    Steps,
    Warmup,
    advanced,
    scaled_rate,
)
from multiring.errors import ArgumentError

# ---- trust ratios ----


def test_a_layer_of_norm_zero_has_no_trust_ratio() -> None:
    assert lars_ratios([0.0, 2.0, 2.0], [1.0, 0.0, 4.0], (), trust=0.001).tolist() == [1.0, 1.0, 0.0005]
    assert lars_ratios([0.0, 2.0], [1.0, 1.0], [0.0, 4.0], trust=0.1, denominator="sum").tolist() == [1.0, 0.05]
    assert lamb_ratios([0.0, 2.0, 3.0], [1.0, 0.0, 6.0]).tolist() == [1.0, 1.0, 0.5]


def test_limits_of_lamb() -> None:
    assert lamb_ratios([5.0, 0.1], [1.0, 1.0], limits=(0.5, 2.0)).tolist() == [2.0, 0.5]
    assert lamb_ratios([5.0, 0.1], [1.0, 1.0], clip=1.0).tolist() == [1.0, 0.1]


def test_larc_clips_the_learning_rate() -> None:
    assert larc_ratios([0.05, 0.2], 0.1, "clip").tolist() == [0.5, 1.0]
    assert larc_ratios([0.05, 0.2], 0.1, "scale").tolist() == [0.05, 0.2]
    assert larc_ratios([0.05], 0.0, "clip").tolist() == [1.0]


# ---- the noise scale ----


def gradients_of(
    generator: np.random.Generator, trials: int, steps: int, shares: list[int], size: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return tr(Sigma) and |G|^2 of each step for Gaussian gradients, and the true noise scale.

    `size` is the number of components of a gradient.
    """
    square, variance = 1.0, 40.0 / size  # for each component of one sample's gradient
    total = sum(shares)
    # Rank i's gradient minus G is sqrt(variance / b_i) z_i. Draw all `size` components of it, trial by trial.
    noises, signals = np.empty((trials, steps)), np.empty((trials, steps))
    for trial in range(trials):
        parts = generator.standard_normal((len(shares), steps, size)) * np.sqrt(variance)
        parts /= np.sqrt(np.array(shares, float))[:, None, None]
        parts[:, :, 0] += math.sqrt(square)
        whole = np.einsum("p,psk->sk", np.array(shares) / total, parts)
        own = (parts**2).sum(axis=2)
        norms = (whole**2).sum(axis=1)
        mean = np.einsum("p,ps->s", np.array(shares) / total, own)
        noises[trial] = (mean - norms) * total / (len(shares) - 1)
        signals[trial] = norms - noises[trial] / total
    return noises, signals, 40.0


@pytest.mark.parametrize("shares", [[8, 8], [12, 4, 8], [5, 9, 2, 16]])
def test_intervals_cover_the_noise_scale(shares: list[int]) -> None:
    noises, signals, truth = gradients_of(np.random.default_rng(len(shares)), 500, 120, shares, 50)
    intervals = [block_bootstrap(noises[i], signals[i], resamples=400, seed=i) for i in range(500)]
    covered = sum(each.low <= truth <= each.high for each in intervals)
    assert 450 <= covered <= 490
    assert noises.mean() / signals.mean() == pytest.approx(truth, rel=0.02)


def test_noise_sample_is_that_of_the_formulas() -> None:
    generator = np.random.default_rng(0)
    shares = [3, 5, 4]
    parts = generator.standard_normal((3, 7))
    whole = np.average(parts, axis=0, weights=shares)
    found = noise_sample([float(each @ each) for each in parts], shares, float(whole @ whole))
    # With equal parts, the estimate is McCandlish's.
    own = np.mean([each @ each for each in parts])
    mean = parts.mean(axis=0)
    equal = noise_sample([float(each @ each) for each in parts], [4, 4, 4], float(mean @ mean))
    assert equal.noise == pytest.approx((own - mean @ mean) / (1 / 4 - 1 / 12))
    assert equal.signal == pytest.approx((12 * (mean @ mean) - 4 * own) / (12 - 4))
    assert found.signal + found.noise / 12 == pytest.approx(float(whole @ whole))
    # A part without samples is ignored.
    assert noise_sample([1.0, 2.0, 9.0], [2, 2, 0], 1.0) == noise_sample([1.0, 2.0], [2, 2], 1.0)


def test_noise_scale_of_one_part_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a single rank needs two micro-batches"):
        noise_sample([1.0], [4], 1.0)
    with pytest.raises(ArgumentError, match="interval of 0 steps"):
        NoiseScale().interval()
    with pytest.raises(ArgumentError, match="window=1"):
        NoiseScale(window=1)


def test_noise_scale_over_a_run() -> None:
    known = NoiseScale(window=10)
    for sample in [NoiseSample(math.nan, 1.0), NoiseSample(2.0, math.inf), *[NoiseSample(1.0, 50.0)] * 30]:
        known.add(sample)
    assert (len(known), known.value, known.steps_needed()) == (10, 50.0, 0)
    again = NoiseScale()
    again.load_state_dict(known.state_dict())
    assert (len(again), again.value) == (10, 50.0)
    assert NoiseScale().steps_needed() == -1
    # Half of the steps have a noise scale of 10, half of 1,000. Steps with a small batch reveal little of the latter.
    run = NoiseScale()
    for noise in [10.0] * 50 + [1000.0] * 50:
        run.add(NoiseSample(1.0, noise))
    assert run.progress_mean(1e-9, blocks=2) == pytest.approx(2 / (1 / 10 + 1 / 1000))  # the harmonic mean
    assert run.progress_mean(1e9, blocks=2) == pytest.approx(505.0)


def test_steps_needed_falls_as_steps_come() -> None:
    generator = np.random.default_rng(1)
    needed = []
    known = NoiseScale()
    for step in range(400):
        known.add(NoiseSample(1.0 + generator.standard_normal(), 50.0 + 20 * generator.standard_normal()))
        if step in {49, 399}:
            needed.append(known.steps_needed(0.05))
    assert 200 < needed[0] < 5000
    assert needed[1] < 3000


# ---- the law ----


def test_fit_finds_the_law_and_prefers_its_exponent() -> None:
    law = Law(6.4, 800.0)
    batches = [2.0**k for k in range(4, 14)]
    needed = [law.needed(batch) for batch in batches]
    found = fit_critical_batch_size(batches, needed)
    assert [found.least, found.critical] == pytest.approx([6.4, 800.0])
    assert max(map(abs, found.residuals(batches, needed))) < 1e-6
    assert max(map(abs, fit_critical_batch_size(batches, needed, 0.8).residuals(batches, needed))) > 0.05


def test_fit_of_published_epochs() -> None:
    """MLPerf's reference convergence points of DeepCAM with LAMB: batch sizes and epochs."""
    batches, epochs = [128, 256, 512, 1024, 2048], [6.95, 9.0, 11.15, 13.0, 22.9]
    law = fit_critical_batch_size(batches, epochs)
    assert 600 < law.critical < 1100
    assert 5.5 < law.least < 7.5


def test_fit_wants_three_batches_above_zero() -> None:
    with pytest.raises(ArgumentError, match="want three or more"):
        fit_critical_batch_size([1, 2], [1.0, 2.0])


def test_advice() -> None:
    found = recommend_batch_size(critical=1000, batch=1000, learning_rate=0.1, steps=5000, samples_per_epoch=50_000)
    own, most = found.choices[2], found.choices[-1]
    assert (own.batch, own.steps, own.samples, own.learning_rate, own.epochs) == (1000, 1.0, 1.0, 0.1, 100.0)
    assert [most.batch, most.steps, most.samples] == pytest.approx([16_000, 17 / 32, 8.5])
    assert most.learning_rate == pytest.approx(0.1 * 32 / 17)
    assert found.pays_up_to == 1000
    assert "epochs" in str(found)
    assert (
        recommend_batch_size(critical=10, batch=1, learning_rate=0.1, optimizer="adam").choices[0].learning_rate is None
    )
    with pytest.raises(ArgumentError, match="batch=0"):
        recommend_batch_size(critical=1, batch=0)


# ---- schedules ----


def test_schedules_at_their_ends() -> None:
    for rule in (Polynomial(10, 2.0, 0.1), Cosine(10, 0.1)):
        assert [rule(0), rule(10), rule(99)] == [1.0, pytest.approx(0.1), pytest.approx(0.1)]
    assert Polynomial(10)(5) == 0.25
    assert Cosine(10)(5) == pytest.approx(0.5)
    assert [Warmup(4, 0.2)(step) for step in (0, 2, 4, 9)] == [0.2, pytest.approx(0.6), 1.0, 1.0]
    assert [Steps((3, 6))(step) for step in (2, 3, 6)] == [1.0, 0.1, pytest.approx(0.01)]
    assert (Warmup(4) * Constant(3.0) * Steps((2,), 0.5))(3) == pytest.approx(0.75 * 3 * 0.5)


def test_a_batch_grows_where_the_rate_would_fall() -> None:
    rule = GrowingBatch(32, (10, 20), factor=0.25, most=256)
    assert [rule.at_step(step) for step in (0, 10, 20)] == [(32, 1.0), (128, 1.0), (256, 0.5)]
    with pytest.raises(ArgumentError, match="GrowingBatch batch=0: want a whole number, 1 or more"):
        GrowingBatch(0, ())


def test_scaled_rates() -> None:
    assert scaled_rate(0.1, 256, 8192) == pytest.approx(3.2)
    assert scaled_rate(0.1, 256, 1024, "sqrt") == pytest.approx(0.2)
    with pytest.raises(ArgumentError, match="'cube'"):
        scaled_rate(0.1, 1, 2, "cube")
    with pytest.raises(ArgumentError, match="Cosine"):
        Cosine(0)


# ---- AdaScale ----


def test_adascale_is_between_one_and_scale() -> None:
    assert adascale_gain(1.0, 0.0, 8) == pytest.approx(8.0)
    assert adascale_gain(0.0, 1.0, 8) == 1.0
    assert adascale_gain(-1.0, -1.0, 8) == 1.0
    assert adascale_gain(4.0, 1.0, 4) == pytest.approx(5.0 / 2.0)


def test_adascale_recovers_the_gain_of_a_gaussian_quadratic() -> None:
    """The loss is |w - x|^2 / 2 with x of variance 9 in each of 20 dimensions, at |w|^2 = 5, so the gain is known."""
    generator = np.random.default_rng(4)
    small, scale, size = 16, 4, 20
    at = np.full(size, 0.5)
    variance = 9.0 * size / small
    rule = AdaScale(scale, small, memory=0.999)
    for _ in range(4000):
        parts = at - 3.0 * generator.standard_normal((scale, size)) / math.sqrt(small)
        whole = parts.mean(axis=0)
        rule.add(noise_sample([float(each @ each) for each in parts], [small] * scale, float(whole @ whole)))
    truth = adascale_gain(variance, 5.0, scale)
    assert rule.gain == pytest.approx(truth, rel=0.03)
    assert 1 < truth < scale
    assert rule.advance() == rule.progress == rule.gain
    again = AdaScale(scale, small)
    again.load_state_dict(rule.state_dict())
    assert (again.gain, again.progress) == (rule.gain, rule.progress)
    assert advanced(Steps((2,)), [1.5, 1.5, 1.5]) == [1.0, 1.0, 0.1]
    assert AdaScale(scale, small).gain == 1.0
    with pytest.raises(ArgumentError, match="AdaScale"):
        AdaScale(0.5, 1)
    with pytest.raises(ArgumentError, match="memory=1"):
        AdaScale(2, 1, memory=1)


# ---- lag, on a quadratic ----


def is_stable(rate: float, momentum: float, lag: int) -> bool:
    """Return whether SGD on w^2 / 2 converges from w = 1, from the spectral radius of its step."""
    # v' = m v + g(w, or the previous w), w' = w - rate v'. The state is (w, v, previous w).
    g = [1.0, 0.0, 0.0] if lag == 0 else [0.0, 0.0, 1.0]
    v = np.array([0.0, momentum, 0.0]) + g
    matrix = np.array([np.array([1.0, 0.0, 0.0]) - rate * v, v, [1.0, 0.0, 0.0]])
    return bool(abs(np.linalg.eigvals(matrix)).max() < 1)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_stability_limits_of_a_quadratic(momentum: float) -> None:
    for lag, limit in ((0, 2 * (1 + momentum)), (1, 1 - momentum)):
        assert is_stable(0.999 * limit, momentum, lag)
        assert not is_stable(1.001 * limit, momentum, lag)


# ---- the loss scale ----


def test_loss_scale_grows_and_shrinks() -> None:
    scale = LossScale(scale=8.0, patience=2, most=16.0)
    changes = [
        scale.update(overflows=each) for each in (False, False, False, False, True, False, True, True, True, True)
    ]
    assert changes == [1, 2, 1, 1, 0.5, 1, 0.5, 0.5, 0.5, 0.5]
    assert (scale.scale, scale.skipped, scale.steps, scale.is_exhausted) == (0.5, 5, 10, True)
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert again == scale
    with pytest.raises(ArgumentError, match="backoff"):
        LossScale(backoff=1.0)
    with pytest.raises(ArgumentError, match="patience"):
        LossScale(patience=0)


# ---- warnings ----

HEALTHY = Facts(batch=512, noise=ConfidenceInterval(900, 700, 1200), momentum=0.9, gradient=1.0, steps=500, skipped=2)
SICK = {
    "batch": Facts(batch=8192, noise=ConfidenceInterval(100, 80, 130)),
    "lag": Facts(lag=1, momentum=0.9),
    "compression": Facts(wire="int8"),
    "residual": Facts(owed=30.0, gradient=1.0),
    "uneven ranks": Facts(shares=(1, 8)),
    "overflow": Facts(steps=200, skipped=60),
}


def test_six_sick_runs_are_named_and_a_healthy_one_is_not() -> None:
    for kind, facts in SICK.items():
        assert [each.kind for each in concerns(facts)] == [kind]
        assert len(str(concerns(facts)[0])) > 60
    assert concerns(HEALTHY) == []
    assert concerns(Facts()) == []


def test_twenty_healthy_runs_are_not_warned_of() -> None:
    generator = np.random.default_rng(6)
    for _ in range(20):
        value = float(generator.uniform(100, 3000))
        facts = Facts(
            batch=float(generator.uniform(0.1, 4.0)) * value,
            noise=ConfidenceInterval(value, 0.8 * value, 1.3 * value),
            lag=int(generator.integers(2)),
            momentum=float(generator.uniform(0.0, 0.45)),
            wire=str(generator.choice(["bf16", "fp16", "int8"])),
            has_feedback=True,
            owed=float(generator.uniform(0, 5)),
            gradient=1.0,
            shares=(int(generator.integers(7, 9)), 8),
            steps=1000,
            skipped=int(generator.integers(20)),
        )
        assert concerns(facts) == []
