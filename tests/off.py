"""Every method of the catalogue at the setting that changes nothing, made for one model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffcache.attach.anatomy import Anatomy, anatomy_of
from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method, method_class
from diffcache.features.base import Method
from diffcache.features.ertacache import READINGS
from diffcache.features.interval import Interval
from diffcache.features.serialize import to_plain
from diffcache.features.tables import Tables
from diffcache.registry import rows_of
from diffcache.step import Site

STEPS = 2  # the first learns the wiring, from the second on a step may be skipped
ALWAYS = 20.0  # a router's logit: the sigmoid is 1 in float32


def off_method(name: str, model: nn.Module) -> Method:
    """Return a method that computes everything, with tables that say so where it needs them."""
    anatomy = anatomy_of(model)
    if name == "profilingdit":  # all blocks are background, so that every list is tapped
        blocks = tuple(f"{entry.key}.0-{entry.depth - 1}" for entry in anatomy.lists)
        return method_class(name)(background=blocks, every=1, warmup=0)
    tables = _tables(name, anatomy)
    if tables is None:
        return make_method(name, **rows_of("method")[name].off)
    more, tensors, settings = tables
    header = {"method": name, "steps": STEPS, **facts_of(model, None), **more}
    return method_class(name)(tables=Tables(header, tensors), **settings)


def _tables(name: str, anatomy: Anatomy) -> tuple[dict[str, Any], ...] | None:
    """Return header, tensors and settings of a method whose tables compute everything."""
    sites = [f"{m.parent}.{m.child}" for m in anatomy.modules_at(Site.MODULE) if m.kind != "empty"] or [
        "nowhere"
    ]  # a model without any has to be refused
    ones, square = torch.ones(STEPS), torch.eye(STEPS)
    if name == "bac":
        pairs = {f"{table}.{site}": square for table in ("pairs", "shift") for site in sites}
        settings = {"count": STEPS, "union": min(2, len(sites))}
        return {"sites": sites, "metric": "cosine"}, pairs, settings
    if name == "harmonica":
        return {"sites": sites}, {"logits": torch.full((STEPS, len(sites)), ALWAYS)}, {}
    if name == "fitted-forecast":
        return {"site": "stack"}, {"products": square, "moves": ones}, {"computed": STEPS}
    if name == "dpcache":
        errors = torch.zeros((STEPS,) * 3)
        return {"site": "stack"}, {"errors": errors}, {"computed": STEPS, "warmup": STEPS}
    if name == "ertacache":
        maps = {"scale": ones[:, None], "shift": 0 * ones[:, None], "errors": 0 * ones}
        none = torch.zeros(0, dtype=torch.int64)
        factors = dict.fromkeys(READINGS.values(), ones)
        return {"threshold": 0.3}, {"reuse": none, **maps, **factors}, {"time": False}
    if name == "regione":
        settings = {"threshold": 2.0, "decay": -1.0, "warmup": 1, "post": 0, "refresh": ()}
        return {}, {"gamma": ones[1:]}, settings
    if name == "tuned":
        return {"choice": to_plain(Interval(every=1), {}), "front": []}, {}, {}
    return None
