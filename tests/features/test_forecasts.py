"""Forecasts along the steps, fitted ones too: exact where they should be, and as the peers' code of each."""

import math
from itertools import combinations

import pytest
import torch

from diffcache.features.collect import RunInfo
from diffcache.features.dmd import DMD, Exponentials
from diffcache.features.fitted import FittedForecast, Weighted
from diffcache.features.foca import FoCa, Heun
from diffcache.features.freqca import FreqCa, HighBand
from diffcache.features.hicache import Hermite, HiCache
from diffcache.features.parts.fit import Fit
from diffcache.features.serialize import to_plain
from diffcache.features.spectrum import Chebyshev, Spectrum
from diffcache.features.tables import Tables
from diffcache.features.tuned import Tuned
from diffcache.offline.fitted_collect import moves
from diffcache.step import Step
from tests.internals import computed_steps

TOTAL = 50


def follow(instead, features, computed):
    """Return the stand-ins of all skipped steps; asking twice changes nothing."""
    state, found = instead.init(), {}
    for index, feature in enumerate(features):
        step = Step(index, total=len(features))
        if index in computed:
            instead.record(state, step, feature)
            assert torch.equal(instead.estimate(state, step), feature)
        else:
            found[index] = instead.estimate(state, step)
            assert torch.equal(instead.estimate(state, step), found[index])
    return found


def curve(total=TOTAL, rows=2, seed=0):
    """Features that bend: damped and oscillating terms of random directions."""
    torch.manual_seed(seed)
    base = torch.randn(5, rows, 6, 4)
    return [
        base[0]
        + 0.03 * s * base[1]
        + math.exp(-s / 9) * base[2]
        + math.cos(s / 7) * base[3]
        + math.sin(s / 7) * base[4]
        for s in range(total)
    ]


@pytest.mark.parametrize(("window", "growth", "warmup"), [(2.0, 0.75, 5), (2.0, 3.0, 3), (1, 0, 1)])
def test_peer_spectrum_intervals(window, growth, warmup, agrees):
    """As SGLang counts: skipped steps in a row plus one, by an interval that grows when it ends."""
    steps, row, width = [], 0, float(window)
    for index in range(TOTAL):
        real = index < warmup or (row + 1) % max(1, math.floor(width)) == 0
        if real and index >= warmup:
            width = round(width + growth, 3)
        row = 0 if real else row + 1
        steps += [index] * real
    ours = computed_steps(Spectrum(window, growth, warmup), TOTAL)
    agrees("spectrum", "SGLang's code, as a loop", steps=(ours, steps))


@pytest.mark.parametrize("blend", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("degree", [0, 1, 4])
def test_peer_spectrum_forecast(degree, blend, agrees):
    """A ridge fit of the whole history at every skipped step, blended with a line."""
    features = curve()
    computed = computed_steps(Spectrum(), TOTAL)
    found = follow(Chebyshev(degree, 0.1, blend), features, computed)

    def rows(steps):
        tau = torch.tensor(steps, dtype=torch.float32)[:, None] * (2 / 50) - 1
        return torch.cos(torch.arange(degree + 1) * torch.acos(tau.clamp(-1, 1)))

    expected = []
    for index in found:
        known = [s for s in computed if s < index]
        x, h = rows(known), torch.stack([features[s] for s in known]).reshape(len(known), -1)
        normal = x.T @ x + 0.1 * torch.eye(degree + 1)
        fit = rows([index]) @ torch.cholesky_solve(x.T @ h, torch.linalg.cholesky(normal))
        last, before = features[known[-1]], features[known[-2]]
        line = last + (last - before) * (index - known[-1]) / (known[-1] - known[-2])
        expected.append(torch.lerp(line, fit.reshape(line.shape), blend))
    agrees("spectrum", "SGLang's code, as a loop", found.values(), expected, 1e-4)


def test_foca_is_exact_on_lines_for_three_steps_and_turns_back_then():
    features = [torch.tensor([[2.0 - 0.5 * s, 3.0 * s]]) for s in range(20)]
    found = follow(Heun(), features, [0, 1, 4, 8, 9, 15])
    for index in (2, 3, 5, 6, 7, 10, 11, 12):
        assert torch.allclose(found[index], features[index], atol=1e-5)
    assert torch.allclose(found[13], 0.75 * features[12] + 0.25 * features[9])


@pytest.mark.parametrize("every", [2, 3, 5, 7])
def test_peer_foca_forecast(every, agrees):
    """The recursion of cache-dit: a window of two values, and the computed anchors."""
    features = curve()
    computed = computed_steps(FoCa(every), TOTAL)
    found = follow(Heun(unit=True), features, computed)
    now = before = anchor = old = None
    at, expected = 0, []
    for index, feature in enumerate(features):
        if index in computed:
            old, anchor, before, now, at = anchor, feature, now, feature, index
            continue
        ahead, slopes = index - at, (anchor - old) + (now - before)
        guess = anchor + min(ahead, 3) / 2 * slopes
        if ahead > 3:
            guess = 3 / ahead * guess + (1 - 3 / ahead) * anchor
        expected.append(guess)
        before, now = now, guess
    agrees("foca", "cache-dit's code, as a loop", found.values(), expected, 1e-4)


def hermite_forecasts(features, computed, order):
    """The formula in FreqCa's released code, whose distances and slopes point backward."""
    known, at, found = [], 0, {}
    for index, feature in enumerate(features):
        if index in computed:
            fresh = [feature]
            for old in known[:order] if index > 1 else ():
                fresh.append((fresh[-1] - old) / (at - index))
            known, at = fresh, index
            continue
        x, guess = 0.71 * (at - index), known[0].clone()
        here, before = 2 * x, 1.0
        for i, slope in enumerate(known[1:], 1):
            guess += slope * (here * 0.71**i / math.factorial(i))
            here, before = 2 * x * here - 2 * i * before, here
        found[index] = guess
    return found


@pytest.mark.parametrize("order", [0, 1, 2, 4])
@pytest.mark.parametrize("every", [2, 5, 9])
def test_peer_hicache_forecast(every, order, agrees):
    features = curve()
    computed = computed_steps(HiCache(every), TOTAL)
    found = follow(Hermite(order, 0.71, start=2), features, computed)
    expected = hermite_forecasts(features, computed, order)
    assert found.keys() == expected.keys()
    agrees("hicache", "FreqCa's released code, as a loop", found.values(), expected.values(), 1e-4)


def test_peer_hicache_pp(agrees):
    theirs = pytest.importorskip("hicache_pp")
    features, computed = curve(), computed_steps(HiCache(5), TOTAL)
    found = follow(Hermite(2, 0.5), features, computed)
    state = theirs.hicache_init(TOTAL, interval=5, max_order=2, first_enhance=3, sigma=0.5)
    steps, expected = [], []
    for index, feature in enumerate(features):
        state["step"] = index
        if theirs.hicache_decide(state) == "full":
            theirs.hicache_update_derivatives(state, feature)
            steps.append(index)
        else:
            expected.append(theirs.hicache_forecast(state))
    agrees("hicache", "hicache-pp, run", found.values(), expected, 1e-5, (computed, steps))


@pytest.mark.parametrize("tokens", [1, 20, 33, 40])
@pytest.mark.parametrize("every", [2, 6])
def test_official_freqca_forecast(every, tokens, agrees):
    """As its released code: two bands, each with differences of its own; the low one is reused."""
    torch.manual_seed(2)
    ways = torch.randn(4, 2, tokens, 3)
    features = [
        ways[0] + math.cos(s / 7) * ways[1] + math.exp(-s / 9) * ways[2] + 0.02 * s * ways[3] for s in range(TOTAL)
    ]
    places = torch.fft.fftfreq(tokens).abs()
    is_low = (places <= 0.1 * places.max())[None, :, None]
    waves = [torch.fft.fft(feature, dim=1) for feature in features]
    low = [torch.fft.ifft(wave * is_low, dim=1).real for wave in waves]
    high = [torch.fft.ifft(wave * ~is_low, dim=1).real for wave in waves]
    computed = computed_steps(FreqCa(every), TOTAL)
    found = follow(HighBand(start=2), features, computed)
    expected = []
    for index, guess in hermite_forecasts(high, computed, 2).items():
        last = max(step for step in computed if step < index)
        expected.append(low[last] + guess)
    agrees("freqca", "its released code, as a loop", found.values(), expected, 1e-4)


@pytest.mark.parametrize("every", [2, 3])
def test_dmd_is_exact_on_exponentials(every):
    torch.manual_seed(1)
    base = torch.randn(2, 3, 2, 8, 4)  # of two samples, each with exponents of its own
    damp = torch.tensor([0.93, 0.85])[:, None, None]
    features = [
        (damp**s * (base[0, 0] * math.cos(s / 6) + base[0, 1] * math.sin(s / 6)) + 0.99**s * base[0, 2])
        for s in range(30)
    ]
    computed = computed_steps(DMD(every, warmup=1), 30)
    found = follow(Exponentials(), features, computed)
    for index in [i for i in found if i > 4 * every]:
        assert torch.allclose(found[index], features[index], atol=1e-4)
    early = [i for i in found if 2 * every < i < 3 * every]  # a line, before there are four
    assert early and all(
        torch.allclose(
            found[i],
            features[2 * every] + (features[2 * every] - features[every]) * ((i - 2 * every) / every),
            atol=1e-5,
        )
        for i in early
    )


@pytest.mark.parametrize(("name", "mine"), [("FoCa", Heun(unit=True)), ("DMD", Exponentials())])
@pytest.mark.parametrize("every", [2, 4, 6])
def test_peer_calibrators_of_cache_dit(name, mine, every, agrees):
    made = pytest.importorskip("cache_dit.caching.cache_contexts.calibrators")
    features, computed = curve(), computed_steps(DMD(every), TOTAL)
    found, theirs = follow(mine, features, computed), getattr(made, f"{name}Calibrator")()
    theirs.maybe_init_state()  # so that its steps count from the first
    pairs = []
    for index, feature in enumerate(features):
        theirs.mark_step_begin()
        if index in computed:
            theirs.update(feature)
        else:
            state, guess = theirs.states["default"], theirs.approximate()
            if name == "FoCa" or len(state._uniform_tail()[0]) >= 4:  # its lines differ, see DMD
                pairs.append((found[index], guess))
    agrees(name.lower(), "cache-dit, run", *zip(*pairs, strict=True), 1e-4)


FITTED_TOTAL = 9


def products(curves):
    """Inner products of features whose entries are polynomials of the step, [T, T]."""
    steps = torch.arange(FITTED_TOTAL, dtype=torch.float64)
    features = torch.stack([sum(c * steps**p for p, c in enumerate(curve)) for curve in curves], 1)
    return features @ features.T, features


def tables(**more):
    header = {"method": "fitted-forecast", "steps": FITTED_TOTAL, "site": "stack", **more}
    inner, _ = products([(1, 2, -0.3), (0, -1, 0.2), (4, 0, 0.1)])
    return Tables(header, {"products": inner, "moves": torch.ones(FITTED_TOTAL)})


def test_weights_are_those_of_least_squares():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(FITTED_TOTAL, 40, generator=generator, dtype=torch.float64)
    fit = Fit(features @ features.T, torch.ones(FITTED_TOTAL), 3, 1e-14)
    found = fit.coefficients((6, 4, 1))[:, 8]
    past = (features[[4, 1]] - features[6]).T
    expected = torch.linalg.lstsq(past, (features[8] - features[6])[:, None]).solution[:, 0]
    assert torch.allclose(found[1:], expected)
    assert torch.allclose(found[0], 1 - expected.sum())


@pytest.mark.parametrize("history", [1, 2, 3])
@pytest.mark.parametrize("computed", [1, 2, 4, FITTED_TOTAL])
def test_the_programme_equals_brute_force(history, computed, agrees):
    generator = torch.Generator().manual_seed(history)
    features = torch.randn(FITTED_TOTAL, 5, generator=generator, dtype=torch.float64).cumsum(0)
    speed = torch.rand(FITTED_TOTAL, generator=generator)
    fit = Fit(features @ features.T, speed, history, 1e-3)

    def cost(steps):
        total = 0.0
        for number, first in enumerate(steps):
            end = steps[number + 1] if number + 1 < len(steps) else FITTED_TOTAL
            anchors = tuple(reversed(steps[: number + 1]))[:history]
            weights = fit.coefficients(anchors)
            gap = torch.zeros(5, dtype=torch.float64)
            for step in range(first + 1, end):
                gap += speed[step] * (weights[:, step] @ features[list(anchors)] - features[step])
            total += float(gap @ gap)
        return total

    every = [(0, *rest) for rest in combinations(range(1, FITTED_TOTAL), computed - 1)]
    best, found = min(map(cost, every)), cost(fit.schedule(computed))
    costs = [torch.tensor([found])], [torch.tensor([best])]
    agrees("fitted-forecast", "all schedules, with its own costs", *costs, 1e-9)


def test_moves_follow_the_noise_levels():
    sigmas = torch.tensor([1.0, 0.5, 0.25, 0.0])
    run = RunInfo(0, 0, torch.arange(3.0), sigmas, 3)
    assert moves(run).tolist() == [-0.5, -0.25, -0.25]
    assert moves(RunInfo(0, 0, torch.arange(3.0), None, 3)).tolist() == [1, 1, 1]


def test_a_tuned_method_survives_a_file(tmp_path):
    method = FittedForecast(computed=4, history=3, tables=tables())
    tensors = {}
    header = {"method": "tuned", "steps": FITTED_TOTAL, "front": [], "choice": to_plain(method, tensors)}
    saved = Tables(header, tensors).save(tmp_path / "a.safetensors")
    again = Tuned(str(tmp_path / "a.safetensors"))
    assert again == Tuned(saved) and again.total == FITTED_TOTAL
    assert again.method == method
    assert again.parts() == method.parts()
    assert eval(repr(again), {"Tuned": Tuned}) == again


def test_freqca_of_one_band_is_reuse_or_hicache():
    features, computed = curve(), computed_steps(FreqCa(), TOTAL)
    all_low = follow(HighBand(share=1.0), features, computed)
    for index, guess in all_low.items():
        assert torch.equal(guess, features[max(s for s in computed if s < index)])
    images = [feature.reshape(2, 2, 3, 4) for feature in features]  # [B, C, H, W]
    still = follow(HighBand(share=0.0), [i - i.mean((2, 3), keepdim=True) for i in images], computed)
    whole = follow(Hermite(2, 0.71), [i - i.mean((2, 3), keepdim=True) for i in images], computed)
    assert all(torch.allclose(still[i], whole[i], atol=1e-5) for i in still)


def test_the_stand_in_is_the_weighted_sum():
    instead = Weighted(((3, (2, 0), (1.5, -0.5)),), 2)
    state = instead.init()
    a, b = torch.ones(3), torch.full((3,), 4.0)
    instead.record(state, Step(0), a)
    instead.record(state, Step(2), b)
    assert torch.equal(instead.estimate(state, Step(2)), b)
    assert torch.equal(instead.estimate(state, Step(3)), 1.5 * b - 0.5 * a)
    assert instead.held(state) == [b, a]
