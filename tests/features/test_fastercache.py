"""FasterCache: a Wan model, step by step against the hook of diffusers, and what it refuses."""

import pytest
import torch

import diffcache
from diffcache.errors import AttachError
from diffcache.features.fastercache import FasterCache, bands_of
from tests.zoo.catalog import cases

STEPS = 20
SAME = ("hidden_states", "timestep")


def halves(case, model, step, seed=0):
    """Return the arguments of the guided and of the unguided call of a step."""
    given = case.kwargs(model, seed, step=step, steps=STEPS)
    text = given["encoder_hidden_states"]
    one = {name: given[name][:1] for name in SAME}
    return [{**one, "encoder_hidden_states": each} for each in (text[:1], text[1:])]


def run(case, model, order=("cond", "uncond"), total=STEPS):
    """Return the outputs of both branches of all steps of a wrapped model's run."""
    found = []
    with torch.no_grad(), diffcache.run(model, steps=total):
        for step in range(total):
            pair = halves(case, model, step)
            outs = {}
            for name in order if step else ("cond", "uncond"):
                with diffcache.branch(name):
                    given = pair[name == "uncond"]
                    outs[name] = model(**given, return_dict=False)[0].clone()
            found.append(torch.stack([outs["cond"], outs["uncond"]]))
    return torch.stack(found)


def call(model, name, given):
    """Call a wrapped model in a branch."""
    with diffcache.branch(name), torch.no_grad():
        model(**given)


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
@pytest.mark.parametrize(("every", "low", "high"), [(5, 1.1, 1.1), (3, 1.2, 0.9)])
def test_peer_fastercache_step_by_step(every, low, high, agrees):
    from diffusers.hooks import FasterCacheConfig, apply_faster_cache

    case = cases()["WanTransformer3DModel"]
    model, theirs, index = case.build(), case.build(), 0
    config = FasterCacheConfig(
        unconditional_batch_skip_range=every,
        alpha_low_frequency=low,
        alpha_high_frequency=high,
        spatial_attention_timestep_skip_range=(2000, 2000),  # never: the other part of it
        current_timestep_callback=lambda: 1000 * (1 - index / STEPS),
    )
    apply_faster_cache(theirs, config)
    expected = []
    with torch.no_grad():
        for index in range(STEPS):
            cond, uncond = halves(case, model, index)
            both = {name: torch.cat([uncond[name], cond[name]]) for name in cond}
            expected.append(theirs(**both, return_dict=False)[0].unsqueeze(1).flip(0))
    with diffcache.wrapped(model, FasterCache(every=1)):
        plain = run(case, model)
    with diffcache.wrapped(model, FasterCache(every, low=low, high=high)) as handle:
        found = run(case, model)
        calls = [call for call in handle.last.calls if not call.computed]
    assert torch.equal(found[:, 0], plain[:, 0])
    skipped = [s for s in range(STEPS) if s / STEPS >= 0.36 and s % every]
    assert {call.branch for call in calls} == {"uncond"}
    # where diffusers ran the unguided half, its output is that of a run without a cache
    far = [(both - one)[1].abs().max() > 1e-4 for both, one in zip(expected, plain, strict=True)]
    theirs = [step for step in range(STEPS) if far[step]]
    steps = [call.index for call in calls], theirs
    agrees("fastercache", "diffusers, run", found, expected, 1e-5, steps)
    assert theirs == skipped
    assert (found - plain)[skipped, 1].abs().amax((1, 2, 3, 4, 5)).min() > 1e-4


@pytest.mark.parametrize(("hold", "outputs"), [(None, 3), ("bf16", 2.5)])
def test_bytes_are_told_before_a_run(hold, outputs):
    """An output of the guided branch, as itself and packed, and two bands of the other's."""
    case = cases()["WanTransformer3DModel"]
    model, output = case.build(), 4 * 2 * 8 * 8 * 4
    size = {"height": 64, "width": 64, "frames": 5, "text_tokens": 6, "batch": 1}
    expected = diffcache.expected_bytes(model, "fastercache", hold=hold, branches=2, **size)
    with diffcache.wrapped(model, FasterCache(), hold=hold) as handle:
        run(case, model)
        assert handle.last.peak_bytes == expected["model"] == outputs * output


def test_bands_add_up_and_low_is_what_is_smooth():
    torch.manual_seed(0)
    values = torch.randn(2, 3, 10, 15)
    low, high = bands_of(values)
    assert torch.allclose(low + high, values, atol=1e-6)
    assert torch.allclose(bands_of(low)[1], torch.zeros(()), atol=1e-5)
    wave = torch.cos(2 * torch.pi * 2 * torch.arange(15) / 15).expand(1, 1, 10, 15)
    assert torch.allclose(bands_of(wave)[0], wave, atol=1e-5)  # frequency 2 of at most 2
    assert torch.allclose(bands_of(wave.mT)[1], torch.zeros(()), atol=1e-5)
    packed = torch.cos(2 * torch.pi * 3 * torch.arange(15) / 15).expand(1, 1, 10, 15)
    assert torch.allclose(bands_of(packed)[1], packed, atol=1e-5)


def test_what_it_cannot_serve_is_refused():
    case, flux = (cases()[f"{name}Transformer{n}DModel"] for name, n in (("Wan", 3), ("Flux", 2)))
    model, tokens = case.build(), flux.build()
    with diffcache.wrapped(model, FasterCache(2, start=0.0)):
        with pytest.raises(AttachError, match="call the guided branch first in every step"):
            run(case, model, ("uncond", "cond"), 4)
        with diffcache.run(model, steps=4):
            call(model, "one", halves(case, model, 0)[0])
            with pytest.raises(AttachError, match=r"shapes \[\[1, .* and \[\[2, "):
                call(model, "both", case.kwargs(model, 0, step=0, steps=4))
    with diffcache.wrapped(tokens, FasterCache()), diffcache.run(tokens, steps=4):
        call(tokens, "one", flux.kwargs(tokens, 0, step=0, steps=4))
        with pytest.raises(AttachError, match="no axes of height and width"):
            call(tokens, "other", flux.kwargs(tokens, 1, step=0, steps=4))
