"""RegionE: the plan of a run, the choice of tokens, and the ratios that are fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from diffcache.errors import AttachError, TablesError
from diffcache.features.collect import RunInfo
from diffcache.features.parts.region_mask import (
    edited_tokens,
    gather,
    rows_of,
    scatter,
    without_scattered,
)
from diffcache.features.regione import MODELS, RegionE
from diffcache.features.tables import Tables
from diffcache.step import Step


def kontext_times(steps: int = 28) -> list[float]:
    """Return the timesteps of FLUX.1-Kontext at 1024 x 1024."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=1.15)
    times: list[float] = scheduler.timesteps.tolist()
    return times


def tables(steps: int, gamma: torch.Tensor | None = None, method: str = "regione") -> Tables:
    gamma = torch.full((steps - 1,), 1.01) if gamma is None else gamma
    return Tables({"method": method, "steps": steps}, {"gamma": gamma})


def decayed(plan, times):
    """Return skipped steps and factors: the paper's rule, written as a while loop per segment."""
    found, last = {}, {}
    for i in range(1, len(times)):
        r = plan.gamma[i - 1] * (1 - (times[i - 1] - times[i]) / 1000)
        full = i <= plan.warmup or i in plan.refresh or i >= plan.total - plan.post
        history = [*last.get(i - 1, []), r]
        if not full and r < 1 and 1 - np.prod(history) <= plan.decay:
            last[i] = history
            found[i] = r if plan.official else float(np.prod(history))
    return found


# ------------------------------------------------------------------------------------ the plan


def test_the_stages_of_28_steps_are_the_published_ones() -> None:
    plan = RegionE().plan()
    phases = [plan.phase(i) for i in range(28)]
    assert phases[:5] == ["full"] * 5
    assert [i for i, phase in enumerate(phases) if phase == "store"] == [5, 15]
    assert phases[6:15] == ["region"] * 9
    assert phases[16:26] == ["region"] * 10
    assert phases[26:] == ["full"] * 2
    assert plan.regions == {*range(6, 15), *range(16, 26)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("official", [True, False])
def test_skips_follow_the_decay(model: str, official: bool) -> None:
    plan = RegionE(model, official=official).plan()
    times = kontext_times()
    skips = plan.skips(times)
    assert skips == pytest.approx(decayed(plan, times))
    assert skips
    assert set(skips) <= plan.regions - {6}


def test_float16_ratios_compute_one_step_less_than_float32_ones() -> None:
    plan = RegionE("flux-kontext").plan()
    exact = replace(plan, gamma=tuple(map(float, MODELS["flux-kontext"].ratios.split())))
    times = kontext_times()
    assert set(plan.skips(times)) - set(exact.skips(times)) == {10}
    assert plan.gamma != exact.gamma


def test_one_ratio_or_the_product_of_all_since_the_last_computed_step() -> None:
    times = torch.linspace(1000, 1000 / 28, 28).tolist()
    gamma = torch.full((27,), 1.02)
    one, all_since = (
        RegionE(tables=tables(28, gamma), decay=0.05, official=official).plan().skips(times)
        for official in (True, False)
    )
    ratio = 1.02 * (1 - 1 / 28)
    assert ratio**3 > 0.95 > ratio**4  # three skipped steps, then a computed one
    assert sorted(one) == sorted(all_since) == [7, 8, 9, 11, 12, 13, 16, 17, 18, 20, 21, 22, 24, 25]
    assert list(one.values()) == pytest.approx([ratio] * 14)
    runs = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]
    assert list(all_since.values()) == pytest.approx([ratio**n for n in runs])


def test_a_negative_decay_skips_nothing_and_a_large_one_all_that_shrinks() -> None:
    times = kontext_times()
    assert RegionE(decay=-1e-9).plan().skips(times) == {}
    plan = RegionE(decay=1.0).plan()
    shrinks = {
        i for i in range(7, 28) if plan.gamma[i - 1] * (1 - (times[i - 1] - times[i]) / 1000) < 1
    }
    assert set(plan.skips(times)) == shrinks & plan.regions


@pytest.mark.parametrize("steps", [7, 10, 20, 28, 50, 100])
def test_stages_scale_with_the_number_of_steps(steps: int) -> None:
    plan = RegionE(tables=tables(steps)).plan()
    phases = [plan.phase(i) for i in range(steps)]
    assert plan.total == steps == RegionE(tables=tables(steps)).parts().when.total
    assert phases.count("store") == 2
    assert phases.index("store") + 1 == plan.warmup == max(1, round(6 * steps / 28))
    assert phases[-plan.post :] == ["full"] * max(1, round(2 * steps / 28))
    assert RegionE().parts().when.total == 28


def test_the_first_and_last_places_of_a_refresh_are_allowed() -> None:
    assert RegionE(refresh=(7, 24)).plan().refresh == (7, 24)
    assert RegionE(refresh=()).plan().regions == frozenset(range(6, 26))


@pytest.mark.parametrize(
    ("model", "denoiser", "named"),
    [
        ("flux-kontext", "QwenImageTransformer2DModel", "'qwen-image-edit'"),
        ("step1x-edit", "QwenImageTransformer2DModel", "'qwen-image-edit-2509'"),
        ("step1x-edit", "FluxTransformer2DModel", "model='flux-kontext',"),
        ("qwen-image-edit-2509", "FluxTransformer2DModel", "model='flux-kontext',"),
    ],
)
def test_published_ratios_of_another_model_are_refused(model, denoiser, named) -> None:
    with pytest.raises(AttachError, match=f"model='{model}': .* {denoiser}; set .*{named}"):
        RegionE(model).check_model({"model": denoiser})
    RegionE(model).check_model({"model": "OwnTransformer2DModel"})
    about = {"method": "regione", "steps": 28, "model": denoiser}
    ratios = Tables(about, {"gamma": torch.ones(27)})
    RegionE(model, tables=ratios).check_model({"model": denoiser})  # fitted to it, whatever it is


def test_foreign_and_broken_tables_are_refused(tmp_path) -> None:
    with pytest.raises(TablesError, match=r"'gamma' is float32 \[26\]; must be \[27\] real"):
        RegionE(tables=tables(28, torch.ones(26)))
    with pytest.raises(ValueError, match="in runs of 4 steps"):
        RegionE(tables=tables(4))
    saved = tables(20).save(tmp_path / "ratios.safetensors")
    method = RegionE(tables=str(saved.path))
    assert method.steps == 20
    assert eval(repr(method), {"RegionE": RegionE}) == method


# ---------------------------------------------------------------------------------- the tokens


def slow_morphology(mask: np.ndarray) -> np.ndarray:
    height, width = mask.shape

    def at(grid, y, x):
        return 0 <= y < height and 0 <= x < width and bool(grid[y, x])

    cross = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
    kept, grown = np.zeros_like(mask), np.zeros_like(mask)
    for y in range(height):
        for x in range(width):
            kept[y, x] = all(at(mask, y + a, x + b) for a, b in cross)
    for y in range(height):
        for x in range(width):
            grown[y, x] = any(at(kept, y + a, x + b) for a in range(-2, 3) for b in range(-2, 3))
    return grown


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_morphology_against_loops(share: float) -> None:
    masks = torch.rand(6, 9, 7, generator=torch.Generator().manual_seed(3)) < share
    for given, made in zip(masks, without_scattered(masks), strict=True):
        assert np.array_equal(made.numpy(), slow_morphology(given.numpy()))


def test_morphology_of_known_shapes() -> None:
    grid = torch.zeros(5, 12, 12, dtype=torch.bool)
    grid[0, 5, 5] = True  # alone
    grid[1, 4:7, 4:7] = True
    grid[2, :2] = True  # two rows at the border
    grid[3, :3] = True
    grid[4] = True
    made = without_scattered(grid)
    assert not made[0].any()
    assert made[1].sum() == 25
    assert made[1, 3:8, 3:8].all()
    assert not made[2].any()
    assert made[3, :4].all()
    assert not made[3, 4:].any()
    assert made[4].all()


def test_edited_tokens_by_their_cosine() -> None:
    reference = torch.randn(2, 12, 5)
    clean = torch.randn(2, 12, 5)
    clean[0, 3], clean[1, 7] = 2.5 * reference[0, 3], -reference[1, 7]
    mask = edited_tokens(clean, reference, 0.3, None)
    for b in range(2):
        for t in range(12):
            one, other = clean[b, t].double(), reference[b, t].double()
            assert bool(mask[b, t]) == bool(one @ other / (one.norm() * other.norm()) <= 0.3)
    assert not mask[0, 3]
    assert mask[1, 7]
    assert edited_tokens(clean, reference, 1.1, (3, 4)).all()
    assert not edited_tokens(clean, reference, -1.1, (3, 4)).any()
    with pytest.raises(ValueError, match=r"grid=\(3, 5\): must have 12 cells"):
        edited_tokens(clean, reference, 0.3, (3, 5))
    with pytest.raises(ValueError, match="must be"):
        edited_tokens(clean, reference[:, :6], 0.3, None)


def test_rows_part_the_sequence_and_come_back() -> None:
    mask = torch.rand(5, 11) < torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0])[:, None]
    mask[0], mask[4] = False, True
    rows = rows_of(mask)
    tokens = torch.randn(5, 11, 3, 2)
    assert rows.shape == (5, 11)
    for b in range(5):
        listed = mask[b].nonzero().flatten().tolist()
        assert rows[b, : len(listed)].tolist() == listed
        first = listed[0] if listed else 0
        assert set(rows[b, len(listed) :].tolist()) <= {first}
    assert torch.equal(scatter(tokens, rows, gather(tokens, rows)), tokens)
    fresh = torch.randn(5, 11, 3, 2)
    put = scatter(tokens, rows, gather(fresh, rows))
    wanted = torch.where(mask[..., None, None], fresh, tokens)
    assert torch.equal(put[1:], wanted[1:])
    assert rows_of(torch.zeros(2, 4, dtype=torch.bool)).shape == (2, 0)


def test_a_constant_velocity_adds_up_to_the_jump() -> None:
    sigmas = torch.linspace(1, 0, 29, dtype=torch.float64)
    start, velocity = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3).double()
    latents = start
    for i in range(5, 15):
        latents = latents + (sigmas[i + 1] - sigmas[i]) * velocity
    torch.testing.assert_close(latents, start + (sigmas[15] - sigmas[5]) * velocity)


def run_of(collector, number: int, steps: int, curve: torch.Tensor, edited: torch.Tensor) -> None:
    """Drive a collector through a run whose velocity has the norms of `curve` on edited tokens."""
    times = torch.linspace(1000, 1000 / steps, steps)
    sigmas = torch.cat([times / 1000, torch.zeros(1)])
    collector.begin(RunInfo(0, number, times, sigmas, steps))
    generator = torch.Generator().manual_seed(number)
    reference = torch.randn(*edited.shape, 4, generator=generator)
    direction = torch.where(edited[..., None], reference, -reference)
    for i in range(steps):
        step = Step(i, float(times[i]) / 1000, steps)
        velocity = torch.where(edited[..., None], curve[i] * direction, 3.0 ** (i % 2) * direction)
        # where it is not edited the clean estimate is the reference, elsewhere its opposite
        sample = sigmas[i] * velocity + torch.where(edited[..., None], -reference, reference)
        collector.output(step, torch.cat([sample, reference], dim=1), velocity)
        collector.guided(step, sample, velocity)
    collector.end()


@pytest.mark.parametrize("steps", [10, 28])
def test_the_fit_finds_the_ratios_of_a_known_decay(steps: int) -> None:
    collector = RegionE(threshold=0.5).collector()
    lengths = 1 - 1 / steps
    gamma = 1 + 0.1 * torch.rand(steps - 1, dtype=torch.float64)
    curve = torch.cat([torch.ones(1), torch.cumprod(gamma * lengths, 0)]).float()
    edited = torch.zeros(2, 9, dtype=torch.bool)
    edited[0, 2:5], edited[1, 0] = True, True
    run_of(collector, 0, steps, curve, edited)
    again = RegionE(threshold=0.5).collector()
    again.load(collector.state())
    edited[1] = False  # a sample without an edit counts for nothing
    run_of(again, 1, steps, curve, edited)
    assert again.settings() == {"threshold": 0.5, "samples": 3}
    found = again.tables()["gamma"]
    torch.testing.assert_close(found, gamma, rtol=1e-5, atol=0)
    plan = RegionE(tables=tables(steps, found)).plan()
    assert plan.gamma == pytest.approx(gamma.tolist(), rel=1e-5)


def test_the_fit_says_what_it_lacks() -> None:
    collector = RegionE(threshold=0.5).collector()
    assert collector.state() == {}
    run_of(collector, 0, 10, torch.ones(10), torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="no token was edited in any run at threshold=0.5"):
        collector.tables()
    collector.begin(RunInfo(0, 0, torch.ones(1), torch.ones(2), 1))
    with pytest.raises(ValueError, match="edits a reference picture"):
        collector.guided(Step(0, 1.0, 1), torch.ones(1, 4, 2), torch.ones(1, 4, 2))
    with pytest.raises(ValueError, match="flow-matching scheduler"):
        collector.begin(RunInfo(0, 0, torch.ones(1), None, 1))
