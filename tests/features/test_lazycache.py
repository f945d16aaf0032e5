"""LazyCache: a run of a pipeline's model against a loop over clean samples, as ComfyUI has it."""

import pytest
import torch

import diffcache
from diffcache.features.lazycache import LazyCache, sigma_of
from diffcache.step import Scene, Step
from tests.zoo.catalog import cases

STEPS = 16
SIGMAS = [(1 - s / STEPS) ** 1.5 for s in range(STEPS + 1)]


def euler(case, model, call):
    """Sample with Euler's method; return the outputs of all steps."""
    x = case.kwargs(model, 0, step=0, steps=STEPS)["hidden_states"]
    outs = []
    with torch.no_grad():
        for step in range(STEPS):
            given = case.kwargs(model, 0, step=step, steps=STEPS)
            outs.append(call({**given, "hidden_states": x}, step).clone())
            x = x + (SIGMAS[step + 1] - SIGMAS[step]) * outs[-1]
    return torch.stack(outs)


@pytest.mark.parametrize(("threshold", "warmup"), [(0.2, 3), (0.5, 1), (1.5, 4)])
def test_peer_lazycache_step_by_step(threshold, warmup, agrees):
    case = cases()["FluxTransformer2DModel"]
    model = case.build()
    rate = total = kept_x = kept_clean = None
    computed = []

    def comfy(given, step):
        nonlocal rate, total, kept_x, kept_clean
        x, sigma = given["hidden_states"], SIGMAS[step]
        if warmup <= step < STEPS - 1 and rate is not None:
            total += float(rate * (x - kept_x).abs().mean() / kept_clean.abs().mean())
            if total < threshold:
                return (x - (x + kept_clean - kept_x)) / sigma
        total = 0.0
        out = model(**given, return_dict=False)[0]
        clean = x - sigma * out
        if kept_x is not None:
            rate = (clean - kept_clean).abs().mean() / (x - kept_x).abs().mean()
        kept_x, kept_clean = x, clean
        computed.append(step)
        return out

    expected = euler(case, model, comfy)
    with diffcache.wrapped(model, LazyCache(threshold, warmup)) as handle:
        with diffcache.run(model, steps=STEPS, sigmas=SIGMAS[:-1]):
            found = euler(case, model, lambda given, _: model(**given, return_dict=False)[0])
        steps = [call.index for call in handle.last.calls if call.computed], computed
    agrees("lazycache", "ComfyUI's code, as a loop", [found], [expected], 1e-5, steps)
    assert warmup < len(computed) < STEPS


def test_noise_of_flow_matching_is_the_level():
    assert sigma_of(Step(0, scene=Scene(0.25, 0.75))) == 0.75
