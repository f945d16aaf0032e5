"""HarmoniCa with a given router: against a loop of its own; official checkpoints read safely."""

import argparse
import os
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch

import diffcache
from diffcache.attach.fingerprint import facts_of
from diffcache.errors import TablesError
from diffcache.features.harmonica import HarmoniCa
from diffcache.features.tables import Tables
from tests.features.test_table import Held
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


@torch.no_grad()
def test_a_run_equals_an_independent_loop(pipe, logits, agrees):
    computes = (torch.sigmoid(logits) > 0.5).tolist()
    computes[0] = [True] * len(SITES)
    assert 0 < sum(map(sum, computes)) < STEPS * len(SITES)
    with diffcache.wrapped(pipe, HarmoniCa(0.5, tables_of(pipe, logits))):
        drawn = draw(pipe)
    twin = pipes()["DiTPipeline"].build(0)
    for place, site in enumerate(SITES):
        parent, _, child = site.rpartition(".")
        listed = [step for step in range(STEPS) if computes[step][place]]
        setattr(twin.transformer.get_submodule(parent), child, Held(twin.transformer.get_submodule(site), listed))
    theirs = draw(twin)
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
