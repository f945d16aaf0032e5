"""BAC in runs: against an independent loop over a tiny policy, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import diffcache
from diffcache.features.bac import BAC
from diffcache.features.combine import Combine
from diffcache.features.parts.when import Table
from diffcache.offline.calibrate import calibrate
from tests.features.bac_policy import (
    SITES,
    STEPS,
    calibrated_like,
    draw,
    observations,
    random_pairs,
    tiny_policy,
)


def independent_loop(pipe, schedules, steps=STEPS):
    """Denoise with every site reused between its steps, written out without any wrapper."""
    model, held = pipe.transformer, {}

    def reused(site, step, compute, *given):
        if step in schedules.get(site, range(steps)) or site not in held:
            held[site] = compute(*given)
        return held[site]

    generator = torch.Generator().manual_seed(2)
    seen = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1))
    sample = torch.randn(3, 4, 2, generator=generator)
    pipe.scheduler.set_timesteps(steps)
    with torch.no_grad():
        for step, timestep in enumerate(pipe.scheduler.timesteps):
            memory = model.time_emb(timestep.expand(3))[:, None]
            memory = torch.cat((memory, model.cond_obs_emb(seen)), 1) + model.cond_pos_emb
            memory = model.encoder(memory)
            x = model.input_emb(sample) + model.pos_emb
            for number, layer in enumerate(model.decoder.layers):
                at = f"decoder.layers.{number}"
                norm = layer.norm1(x)
                x = x + reused(f"{at}.self_attn", step, layer.self_attn, norm, norm, model.mask)
                given = (layer.norm2(x), memory, model.memory_mask)
                x = x + reused(f"{at}.multihead_attn", step, layer.multihead_attn, *given)
                both = torch.nn.Sequential(layer.linear1, torch.nn.GELU(), layer.linear2)
                x = x + reused(f"{at}.linear2", step, both, layer.norm3(x))
            out = model.head(model.ln_f(x))
            sample = pipe.scheduler.step(out, timestep, sample, generator=generator)[0]
    return sample


@pytest.mark.parametrize("seed", range(3))
def test_hand_made_schedules_equal_an_independent_loop(seed):
    """Bit for bit; sites that are not named run at every step."""
    pipe, generator = tiny_policy(), torch.Generator().manual_seed(seed)
    named = SITES[seed:]
    schedules = {
        site: [0, *(1 + torch.randperm(STEPS - 1, generator=generator)[:3]).tolist()]
        for site in named
    }
    expected = independent_loop(pipe, schedules)
    with diffcache.wrapped(pipe, Combine(Table(schedules, STEPS), site="module")):
        assert torch.equal(draw(pipe), expected)
    assert not torch.equal(draw(pipe), expected)


@pytest.mark.parametrize("settings", [{}, {"objective": "adjacent"}, {"official": True}])
def test_calibrated_schedules_equal_an_independent_loop(settings):
    """From calibration to the sample, bit for bit."""
    pipe = tiny_policy()
    method = calibrate(pipe, BAC(4, union=3, **settings), observations(), steps=STEPS)
    expected = independent_loop(pipe, method.schedules())
    with diffcache.wrapped(pipe, method):
        assert torch.equal(draw(pipe), expected)


def test_modules_run_as_often_as_scheduled():
    """Counted by hooks; the first linear of the feed-forward runs when the second does."""
    pipe = tiny_policy()
    method = BAC(4, union=2, tables=calibrated_like(pipe, random_pairs(4)))
    ran = {}
    for name, module in pipe.transformer.named_modules():
        if name in SITES or name.endswith("linear1"):
            module.register_forward_hook(
                lambda *_, name=name: ran.__setitem__(name, ran.get(name, 0) + 1)
            )
    with diffcache.wrapped(pipe, method):
        draw(pipe)
        expected = {site: len(steps) for site, steps in method.schedules().items()}
        both = expected | {s[:-1] + "1": n for s, n in expected.items() if s.endswith("2")}
        assert ran == both
        draw(pipe)  # the second run starts anew
    assert ran == {name: 2 * count for name, count in both.items()}


def test_another_length_of_run_is_refused():
    pipe = tiny_policy()
    method = BAC(4, union=0, tables=calibrated_like(pipe, random_pairs(0)))
    with (
        diffcache.wrapped(pipe, method),
        pytest.raises(diffcache.errors.DiffcacheError, match=r"12.*11|11.*12"),
    ):
        draw(pipe, steps=11)
