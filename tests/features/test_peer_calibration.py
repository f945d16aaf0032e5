"""Calibration for TeaCache and MagCache, against hooks on an uncached run."""

from itertools import pairwise

import pytest
import torch

import diffcache
from diffcache.features.magcache import MagCache
from diffcache.features.teacache import TeaCache
from tests.zoo.pipes import pipes

STEPS = 6

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def made():
    case = pipes()["FluxPipeline"]
    pipe = case.build(0)
    prompts = []
    for seed in range(2):
        prompt = case.call(pipe, seed, STEPS)
        prompt.pop("generator", None)
        prompt["latents"] = latents_of(case, pipe, seed)
        prompts.append(prompt)
    return case, pipe, prompts


def latents_of(case, pipe, seed):
    """The noise a call starts from, so that a run can be drawn again."""
    seen = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["hidden_states"].clone()), with_kwargs=True
    )
    with torch.no_grad():
        pipe(**case.call(pipe, seed, 1))
    hook.remove()
    return seen[0]


def watched(pipe, prompt):
    """Of every step: the input of the first attention, and what each list takes and returns."""
    model, seen = pipe.transformer, []
    lists = [list(model.transformer_blocks), list(model.single_transformer_blocks)]
    attention = lists[0][0].attn

    def arrive(module, args, kwargs):
        seen[-1]["probe"] = kwargs["hidden_states"].clone()

    def take(module, args, kwargs, key):
        if key == 0:
            seen.append({})
        seen[-1]["in", key] = [kwargs["encoder_hidden_states"], kwargs["hidden_states"]]

    def leave(module, args, kwargs, out, key):
        seen[-1]["out", key] = [out[0].clone(), out[1].clone()]

    hooks = [attention.register_forward_pre_hook(arrive, with_kwargs=True)]
    for key, blocks in enumerate(lists):
        hooks.append(
            blocks[0].register_forward_pre_hook(
                lambda m, a, k, key=key: take(m, a, k, key), with_kwargs=True, prepend=True
            )
        )
        hooks.append(
            blocks[-1].register_forward_hook(lambda m, a, k, o, key=key: leave(m, a, k, o, key), with_kwargs=True)
        )
    pipe(**prompt)
    for hook in hooks:
        hook.remove()
    return seen


def test_tables_are_what_hooks_on_uncached_runs_see(made):
    _, pipe, prompts = made
    runs = [watched(pipe, prompt) for prompt in prompts]
    points, ratios = [], []
    for run in runs:
        for before, now in pairwise(run):
            moved = (now["probe"] - before["probe"]).abs().sum() / before["probe"].abs().sum()
            error = sum((b - a).abs().sum() for a, b in zip(before["out", 1], now["out", 1], strict=True))
            scale = sum(a.abs().sum() for a in before["out", 1])
            points.append((float(moved), float(error / scale)))
        added = [torch.cat([sum(s["out", k][n] - s["in", k][n] for k in (0, 1)) for n in (0, 1)], 1) for s in run]
        norms = torch.stack([value.norm(dim=-1) for value in added])
        ratios.append((norms[1:] / norms[:-1]).flatten(1).mean(1))
    tea, mag = diffcache.calibrate(pipe, [TeaCache(), MagCache()], prompts, steps=STEPS, batch_size=1)
    assert len(tea.tables["points"]) == 2 * (STEPS - 1)
    assert torch.allclose(tea.tables["points"], torch.tensor(points, dtype=torch.float64), rtol=1e-3, atol=1e-6)
    expected = torch.stack(ratios).mean(0).double()
    assert torch.allclose(mag.tables["ratios"][1:], expected, rtol=1e-3)
    assert mag.tables["ratios"][0] == 1
