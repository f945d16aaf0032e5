"""Forecasts along the steps: exact where they should be, and as the peers' code of each."""

import math

import pytest
import torch

from diffcache.features.dmd import DMD, Exponentials
from diffcache.features.foca import FoCa, Heun
from diffcache.features.freqca import FreqCa, HighBand
from diffcache.features.hicache import Hermite, HiCache
from diffcache.features.spectrum import Chebyshev, Spectrum
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


# Spectrum -------------------------------------------------------------------------------------


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


# FoCa -----------------------------------------------------------------------------------------


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


# HiCache --------------------------------------------------------------------------------------


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


def test_hicache_of_order_one_is_taylors_at_the_root_of_a_half():
    features = [torch.tensor([[2.0 - 0.5 * s, 3.0 * s]]) for s in range(20)]
    found = follow(Hermite(1, math.sqrt(0.5)), features, [0, 1, 4, 8, 9, 15])
    assert all(torch.allclose(found[i], features[i], atol=1e-5) for i in found)


# FreqCa ---------------------------------------------------------------------------------------


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


def test_freqca_of_one_band_is_reuse_or_hicache():
    features, computed = curve(), computed_steps(FreqCa(), TOTAL)
    all_low = follow(HighBand(share=1.0), features, computed)
    for index, guess in all_low.items():
        assert torch.equal(guess, features[max(s for s in computed if s < index)])
    images = [feature.reshape(2, 2, 3, 4) for feature in features]  # [B, C, H, W]
    still = follow(HighBand(share=0.0), [i - i.mean((2, 3), keepdim=True) for i in images], computed)
    whole = follow(Hermite(2, 0.71), [i - i.mean((2, 3), keepdim=True) for i in images], computed)
    assert all(torch.allclose(still[i], whole[i], atol=1e-5) for i in still)


# DMD ------------------------------------------------------------------------------------------


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


def test_dmd_on_features_that_stand_still_returns_them():
    features = [torch.full((1, 4), 3.0)] * 20
    found = follow(Exponentials(), features, range(0, 20, 2))
    assert all(torch.allclose(guess, features[0]) for guess in found.values())
