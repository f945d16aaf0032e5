"""A tiny policy for BAC, and tables of the sites it has."""

from __future__ import annotations

import torch

from diffcache.features.bac import BAC
from diffcache.features.tables import Tables
from diffcache.offline.calibrate import calibrate
from diffcache.pipelines.policy import DiffusionPolicyPipeline, scheduler
from diffcache.pipelines.policy_transformer import TransformerForDiffusion

STEPS = 12
SITES = [
    f"decoder.layers.{layer}.{child}" for layer in range(2) for child in ("self_attn", "multihead_attn", "linear2")
]


def tiny_policy():
    torch.manual_seed(3)
    model = TransformerForDiffusion(
        input_dim=2,
        output_dim=2,
        horizon=4,
        n_obs_steps=2,
        cond_dim=3,
        n_layer=2,
        n_head=2,
        n_emb=16,
        causal_attn=True,
    )
    for parameter in model.parameters():  # random features that change a lot
        torch.nn.init.normal_(parameter, std=0.3)
    pipe = DiffusionPolicyPipeline(model.eval(), scheduler(), n_action_steps=2)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, steps=STEPS):
    seen = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1))
    return pipe(seen, steps, torch.Generator().manual_seed(2)).chunk


def observations(count=3):
    seen = torch.randn(count, 2, 2, 3, generator=torch.Generator().manual_seed(5))
    return [{"observation": part} for part in seen]


def tables(pairs, metric="cosine", **header):
    """Tables from site -> pairs; the shift falls with the site's place."""
    steps = len(next(iter(pairs.values())))
    tensors = {}
    for number, (site, matrix) in enumerate(pairs.items()):
        tensors[f"pairs.{site}"] = matrix.float()
        tensors[f"shift.{site}"] = torch.full((steps, steps), float(10 - number))
    about = {"method": "bac", "steps": steps, "sites": list(pairs), "metric": metric}
    return Tables(about | header, tensors)


def random_pairs(seed, steps=STEPS, sites=SITES):
    generator = torch.Generator().manual_seed(seed)
    return {site: torch.rand(steps, steps, generator=generator) for site in sites}


def calibrated_like(pipe, pairs):
    """Tables of given pairs with the header of a real calibration."""
    real = calibrate(pipe, BAC(1, union=0), observations(1), steps=STEPS).tables
    return tables(pairs, **{k: v for k, v in real.header.items() if k not in ("sites", "metric")})
