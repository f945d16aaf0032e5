"""Calibration sees the same queries and keys through the door as where torch attends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.offline import tracing
from diffcache.step import CURRENT, Step
from tests.zoo.catalog import cases

CASES = cases()
SERVED = [
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "UNet2DConditionModel",
    "WanTransformer3DModel",
    "CogVideoXTransformer3DModel-15",
    "DiTTransformer2DModel",
]
OTHERS = ["LTX2VideoTransformer3DModel", "CosmosTransformer3DModel", "MochiTransformer3DModel"]


class Noted:
    wants_attention = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor, Tensor]] = []

    def attention(self, step: Step, site: str, query: Tensor, key: Tensor) -> None:
        self.calls.append((site, query, key))


def noted(name: str, by_mode: bool) -> list[tuple[str, Tensor, Tensor]]:
    model, collector = CASES[name].build(0), Noted()
    paths = [f"{site.parent}.{site.child}" for site in tracing.anatomy_of(model).modules if site.kind == "attention"]
    watch: Any = tracing._attention_watch(model, [collector])  # type: ignore[list-item]
    assert isinstance(watch, tracing._AttentionMode) == (name in OTHERS)
    if by_mode:
        if name in SERVED:
            watch.remove()
        watch = tracing._AttentionMode(model, [collector], paths)  # type: ignore[list-item]
    token = CURRENT.set(SimpleNamespace(step=Step(0, total=1)))
    try:
        with watch, torch.no_grad():
            model(**CASES[name].kwargs(model, 0, 3))
    finally:
        CURRENT.reset(token)
    return collector.calls


@pytest.mark.parametrize("name", SERVED)
def test_the_door_shows_what_torch_attends_with(name: str) -> None:
    wanted = noted(name, by_mode=True)
    made = noted(name, by_mode=False)
    assert [call[0] for call in made] == [call[0] for call in wanted]
    for one, other in zip(made, wanted, strict=True):
        assert torch.equal(one[1], other[1]) and torch.equal(one[2], other[2])


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_door_does_not_know_is_seen_where_torch_attends(name: str) -> None:
    assert noted(name, by_mode=False)
