"""HarmoniCa with a given router: against a loop of its own; official checkpoints read safely."""

import argparse
import os
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch.nn import functional

import diffcache
from diffcache.attach.fingerprint import facts_of
from diffcache.errors import TablesError
from diffcache.features.harmonica import HarmoniCa
from diffcache.features.tables import Tables
from tests.zoo.pipes import pipes

STEPS, BLOCKS = 6, 4
SITES = [f"transformer_blocks.{n}.{child}" for n in range(BLOCKS) for child in ("attn1", "ff")]


@pytest.fixture(scope="module")
def pipe():
    return pipes()["DiTPipeline"].build(0)


@pytest.fixture
def logits():
    return 3 * torch.randn(STEPS, len(SITES), generator=torch.Generator().manual_seed(3))


def tables_of(pipe, logits, **changed):
    facts = facts_of(pipe.transformer, pipe.scheduler)
    header = {"method": "harmonica", **facts, "steps": len(logits), "sites": SITES, **changed}
    return Tables(header, {"logits": logits})


def draw(pipe, steps=STEPS):
    generator = torch.Generator().manual_seed(7)
    call = dict(guidance_scale=4.0, num_inference_steps=steps, generator=generator)
    return pipe([1, 4], output_type="np", **call).images


def independent(pipe, computes):
    """Draw as `draw` does, with a DiT forward of its own that keeps and reuses outputs."""
    model, scheduler, kept = pipe.transformer, pipe.scheduler, {}
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(7))
    labels = torch.tensor([1, 4, 1000, 1000])
    x = torch.cat([noise, noise])
    scheduler.set_timesteps(STEPS)
    for step, t in enumerate(scheduler.timesteps):
        times = t.expand(4)
        hidden = model.pos_embed(torch.cat([x[:2], x[:2]]))
        for number, block in enumerate(model.transformer_blocks):
            normed, gate, shift, scale, gate_ff = block.norm1(hidden, times, labels, hidden_dtype=hidden.dtype)
            if computes[step][2 * number]:
                kept[number, 0] = block.attn1(normed)
            hidden = gate.unsqueeze(1) * kept[number, 0] + hidden
            normed = block.norm3(hidden) * (1 + scale[:, None]) + shift[:, None]
            if computes[step][2 * number + 1]:
                kept[number, 1] = block.ff(normed)
            hidden = gate_ff.unsqueeze(1) * kept[number, 1] + hidden
        embedded = model.transformer_blocks[0].norm1.emb(times, labels, hidden_dtype=hidden.dtype)
        shift, scale = model.proj_out_1(functional.silu(embedded)).chunk(2, dim=1)
        hidden = model.norm_out(hidden) * (1 + scale[:, None]) + shift[:, None]
        hidden = model.proj_out_2(hidden).reshape(-1, 4, 4, 2, 2, 8)
        out = torch.einsum("nhwpqc->nchpwq", hidden).reshape(-1, 8, 8, 8)
        start, end = out[:, :4].chunk(2)
        guided = end + 4.0 * (start - end)
        x = scheduler.step(torch.cat([guided, guided]), t, x).prev_sample
    pictures = pipe.vae.decode(x[:2] / pipe.vae.config.scaling_factor).sample
    return (pictures / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()


@torch.no_grad()
def test_a_run_equals_an_independent_loop(pipe, logits, agrees):
    computes = (torch.sigmoid(logits) > 0.5).tolist()
    computes[0] = [True] * len(SITES)
    assert 0 < sum(map(sum, computes)) < STEPS * len(SITES)
    with diffcache.wrapped(pipe, HarmoniCa(0.5, tables_of(pipe, logits))):
        drawn = draw(pipe)
    theirs = independent(pipe, computes)
    numbers = [torch.from_numpy(drawn)], [torch.from_numpy(theirs)]
    agrees("harmonica", "paper, as a loop", *numbers)
    assert not np.array_equal(drawn, draw(pipe))


def official(path, logits, **changed):
    """Write what the official script writes; its routers count down to the first step."""
    rows = OrderedDict((f"{i}.prob", row) for i, row in enumerate(logits.flip(0)))
    moments = {"step": torch.tensor(9.0), "exp_avg": logits[0], "exp_avg_sq": logits[0]}
    groups = [{"lr": 0.01, "betas": (0.9, 0.999), "params": [0], "fused": None}]
    arguments = argparse.Namespace(num_sampling_steps=len(logits), l1=7e-8, wandb=False, ckpt=None)
    held = {"routers": rows, "opt": {"state": {0: moments}, "param_groups": groups}, "args": arguments, **changed}
    torch.save(held, path)
    return path


def test_an_official_checkpoint_is_the_same_router(pipe, logits, tmp_path):
    method = HarmoniCa.load_official(official(tmp_path / "router.pt", logits), threshold=0.5)
    assert torch.equal(method.measured()["logits"], logits)
    assert method.measured().header["sites"] == SITES
    own = HarmoniCa(0.5, tables_of(pipe, logits))
    assert method.compute_ratio == own.compute_ratio
    drawn = []
    for each in (method, own):
        with diffcache.wrapped(pipe, each):
            drawn.append(draw(pipe))
    assert np.array_equal(*drawn)
    flux = pipes()["FluxPipeline"].build(0)
    with pytest.raises(TablesError, match="router of DiTTransformer2DModel"):
        diffcache.wrapped(flux, method)


class Evil:
    """Makes a folder when unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("place", ["args", "namespace", "routers", "opt", "plain", "key"])
def test_a_checkpoint_with_code_in_it_never_runs(logits, tmp_path, place):
    path, trap = tmp_path / "router.pt", Evil(tmp_path / "trap")
    if place == "plain":
        path.write_bytes(pickle.dumps({"routers": trap}, protocol=2))
    elif place == "namespace":
        official(path, logits, args=argparse.Namespace(num_sampling_steps=6, note=trap))
    elif place == "routers":
        official(path, logits, routers={"0.prob": trap})
    else:
        official(path, logits, **{place: trap})
    with pytest.raises(TablesError, match="nothing else"):
        HarmoniCa.load_official(path)
    assert not (tmp_path / "trap").exists()
    torch.load(path, weights_only=False) if place != "plain" else pickle.loads(path.read_bytes())
    assert (tmp_path / "trap").exists()  # so that the test would see it


def test_the_allow_list_does_not_outlive_the_load(logits, tmp_path):
    before = set(torch.serialization.get_safe_globals())
    HarmoniCa.load_official(official(tmp_path / "router.pt", logits))
    assert set(torch.serialization.get_safe_globals()) == before
