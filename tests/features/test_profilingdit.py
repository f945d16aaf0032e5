"""ProfilingDiT: its measurements, planted and in pipelines; runs against a loop; attention that is watched."""

import dataclasses
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache.features.collect import RunInfo
from diffcache.features.parts.when import Table
from diffcache.features.profilingdit import Decreasing, ProfilingDiT, background_of
from diffcache.features.tables import Tables
from diffcache.offline import tracing
from diffcache.offline.calibrate import calibrate
from diffcache.offline.profilingdit_collect import (
    ProfileCollector,
    above_otsu,
    foreground_of,
    likeness,
    overlap,
    patches,
    received_attention,
    token_grid,
)
from diffcache.step import CURRENT, Step
from tests.internals import computed_steps, reuse_in
from tests.zoo.case import randomize
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes


def test_received_attention_is_the_mean_of_the_whole_map(monkeypatch):
    query, key = torch.randn(2, 4, 17, 8), torch.randn(2, 2, 17, 8)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    expected = scores.softmax(-1).mean((1, 2))
    assert torch.allclose(received_attention(query, key), expected, atol=1e-6)
    monkeypatch.setattr("diffcache.offline.profilingdit_collect.CHUNK", 300)  # two rows at a time
    assert torch.allclose(received_attention(query, key), expected, atol=1e-6)
    some = received_attention(query, key, queries=5)
    places = [i * 17 // 5 for i in range(5)]
    assert torch.allclose(some, scores[:, :, places].softmax(-1).mean((1, 2)), atol=1e-6)


def test_otsu_is_the_best_of_all_thresholds():
    for seed in range(20):
        values = torch.randn(9, generator=torch.Generator().manual_seed(seed)).exp()
        values[3] = values[5]
        best, mask = -1.0, None
        for cut in values:
            high = values > cut
            if high.any() and not high.all():
                a, b = values[high].double(), values[~high].double()
                between = len(a) * len(b) * float(a.mean() - b.mean()) ** 2
                if between > best * (1 + 1e-12):
                    best, mask = between, high
        assert torch.equal(above_otsu(values[None])[0], mask)
    assert not above_otsu(torch.ones(1, 6)).any()
    assert not above_otsu(torch.ones(1, 1)).any()


def test_likeness_is_the_correlation_over_pairs_of_tokens():
    one, two = torch.randn(7, 4), torch.randn(7, 9)
    rows = [(t - t.mean(0)) / (t - t.mean(0)).norm(dim=1, keepdim=True) for t in (one, two)]
    found = [[float(r[i] @ r[j]) for i in range(7) for j in range(i)] for r in rows]
    expected = torch.corrcoef(torch.tensor(found))[0, 1]
    assert likeness(one, two) == pytest.approx(float(expected), abs=1e-5)
    turn = torch.linalg.qr(torch.randn(4, 4)).Q
    assert likeness(one, 3 * one @ turn + 1) == pytest.approx(1.0)
    assert likeness(one[:2], two[:2]) == 0.0


def test_overlap_is_averaged_over_frames_with_a_foreground():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    attention = torch.tensor([[9.0, 0, 0, 0, 9, 9, 0, 0, 9, 9, 9, 0]])
    assert overlap(attention, mask, 3) == (1.5, 2)  # frames: a half, none there, all


def planted(block, mask, text, text_first, seed):
    """Return queries and keys of a block that attends to the mask or away from it."""
    generator = torch.Generator().manual_seed(seed)
    looks = 1.0 if block % 2 else -1.0
    query = torch.zeros(1, 2, len(mask) + len(text), 8)
    query[..., 0] = 4.0
    image = 0.3 * torch.randn(1, 2, len(mask), 8, generator=generator)
    image[..., 0] = looks * (2.0 * mask - 1.0)
    words = text.expand(1, 2, *text.shape)
    return query, torch.cat([words, image] if text_first else [image, words], 2)


def profile(collector, text_first, tokens=12, words=5, steps=6, given=lambda out: out):
    """Feed a collector a run of two lists of four blocks whose odd ones see the foreground."""
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[3:7] = True
    text = torch.randn(words, 8)
    collector.begin(RunInfo(0, 0, torch.arange(steps).float(), None, steps))
    for index in range(steps):
        step = Step(index, total=steps)
        for name in ("double", "single"):
            for block in range(4):
                q, k = planted(block, mask, text, text_first, 7 * index + block)
                collector.attention(step, f"{name}.{block}.attn", q, k)
        out = 0.01 * torch.randn(1, tokens, 16) + mask[None, :, None] * torch.linspace(1, 2, 16)
        collector.output(step, given(out), out)
    collector.end()


def calibrated(method, collector):
    return dataclasses.replace(method, tables=Tables({"method": "profilingdit", "steps": 6}, collector.tables()))


@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("words", [0, 5])
def test_blocks_planted_to_see_the_foreground_are_found(text_first, words):
    method = ProfilingDiT(sampled=2)
    collector = method.collector()
    profile(collector, text_first, words=words)
    found = collector.tables()
    for name in ("overlap.double", "overlap.single"):
        assert found[name].tolist() == [0.0, 1.0, 0.0, 1.0]
    end = "first" if text_first else "last"
    assert collector.settings()["text"] == ({"double": end, "single": end} if words else {})
    ready = calibrated(method, collector)
    assert ready.parts().blocks == ("double.0", "double.2", "single.0", "single.2")
    half = dataclasses.replace(ready, share=0.25)
    assert half.parts().blocks == ("double.0", "double.2")
    assert dataclasses.replace(ready, share=0.0).parts().blocks == ()
    assert len(dataclasses.replace(ready, share=1.0).parts().blocks) == 2
    assert dataclasses.replace(ready, background="double.3").parts().blocks == ("double.3",)


def test_a_foreground_can_be_given():
    mask = torch.zeros(12, dtype=torch.bool)
    mask[:3] = True  # which no block looks at but those that look away
    seen = []

    def of(step, value):
        seen.append((step.index, tuple(value.shape)))
        return mask

    for foreground in (mask, mask[None], of):
        collector = ProfilingDiT(sampled=3, text="first", foreground=foreground).collector()
        profile(collector, True)
        assert collector.tables()["overlap.double"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert seen == [(0, (1, 12, 16)), (3, (1, 12, 16))]


def test_cross_attention_and_other_sizes_are_left_out():
    collector = ProfileCollector(ProfilingDiT(sampled=1))
    step = Step(0, total=1)
    self_q, cross_k = torch.randn(1, 2, 12, 8), torch.randn(1, 2, 5, 8)
    collector.attention(step, "blocks.0.attn2", self_q, cross_k)
    collector.attention(step, "blocks.0.attn1", self_q, self_q)
    collector.attention(step, "blocks.0.attn3", -self_q, -self_q)  # not the first of its block
    collector.attention(step, "pooler.attn", self_q, self_q)
    collector.attention(step, "blocks.2.attn1", self_q[:, :, :7], self_q[:, :, :7])
    out = torch.randn(1, 12, 16)
    collector.output(step, out, out)
    found = collector.tables()
    assert list(found) == ["overlap.blocks"] and found["overlap.blocks"].shape == (1,)
    expected = overlap(received_attention(self_q, self_q), foreground_of(out), 1)
    assert found["overlap.blocks"][0] == pytest.approx(expected[0] / expected[1])


def test_the_median_and_unmeasured_blocks():
    tables = Tables({"method": "profilingdit"}, {"overlap.b": torch.tensor([0.5, 0.1, float("nan"), 0.2, 0.5, 0.9])})
    assert background_of(tables, None) == ("b.1", "b.3")
    assert background_of(tables, 0.6) == ("b.0-1", "b.3")  # of equal ones the first


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FluxPipeline", "first"),
        ("HunyuanVideoPipeline", "last"),
        ("CogVideoXPipeline", "first"),  # whose latents have frames before channels
        ("WanPipeline", ""),
    ],
)
def test_calibration_on_a_pipeline(name, text, tmp_path):
    case = pipes()[name]
    pipe, file = case.build(0), tmp_path / "profile.safetensors"
    method = ProfilingDiT(every=2, warmup=0, sampled=2)
    made = calibrate(pipe, method, [case.call(pipe, 0, 4)], out=file)
    lists = [name.removeprefix("overlap.") for name in made.tables.names()]
    assert set(lists) == {key.key for key in diffcache.inspect(pipe.transformer).lists}
    assert made.tables.header["text"] == (dict.fromkeys(lists, text) if text else {})
    values = torch.cat([made.tables[name] for name in made.tables.names()])
    assert values.isfinite().all() and 0 < values.min() < values.max() <= 1
    loaded = dataclasses.replace(method, tables=file)
    assert loaded == made and loaded.parts() == made.parts()


STEPS = 50
WAN = [0, *range(2, 8), *range(10, 21), *range(25, 33), 37, 38]
SINGLE = [0, 2, 4, 5, 6, 7, *range(10, 22), 23, 25, 26, 27, 31, 33]


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Linear(size, size)

    def forward(self, hidden_states, temb):
        return hidden_states + torch.tanh(self.weight(hidden_states) + temb)


class Toy(nn.Module):
    def __init__(self, depth, size=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(depth))

    def forward(self, hidden_states, timestep):
        for block in self.blocks:
            hidden_states = block(hidden_states, timestep)
        return hidden_states


def toy(depth):
    return Toy(depth).double().eval().requires_grad_(False)


def samples(steps):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, 4, generator=generator, dtype=torch.float64)
    drift = torch.randn(1, 16, 4, generator=generator, dtype=torch.float64)
    return [(x + 0.05 * s * drift, torch.tensor(1.0 - s / steps)) for s in range(steps)]


def by_blocks(model, background, computes, steps):
    """Return outputs and block evaluations of a scheduler that knows one block at a time."""
    runs, outs, evaluated = {}, [], []
    for index, (x, t) in enumerate(samples(steps)):
        count = 0
        if index in computes:
            for number, block in enumerate(model.blocks):
                if number in background and number - 1 not in background:
                    start, given = number, x
                x, count = block(x, t), count + 1
                if number in background and number + 1 not in background:
                    runs[start] = x - given
        else:
            for number, block in enumerate(model.blocks):
                if number not in background:
                    x, count = block(x, t), count + 1
                elif number - 1 not in background:
                    x = x + runs[number]
        outs.append(x)
        evaluated.append(count)
    return torch.stack(outs), evaluated


def wrapped_run(model, method, steps):
    with diffcache.wrapped(model, method) as handle:
        outs = torch.stack([model(x, timestep=t) for x, t in samples(steps)])
        evaluated = [sum(ran for ran, _ in call.counts.values()) for call in handle.last.calls]
    return outs, evaluated


@pytest.mark.parametrize(
    "background", [[0], [0, 1, 2], [1, 3], [2, 3, 4, 6, 7], [7], list(range(8)), [0, 1, 3, 4, 5, 7]]
)
def test_runs_of_blocks_equal_a_loop_that_knows_one_block_at_a_time(background, agrees):
    model = toy(8)
    method = ProfilingDiT(background=tuple(f"blocks.{i}" for i in background), every=3, warmup=4)
    computes = [s for s in range(20) if s < 4 or (s - 4) % 3 == 0]
    outs, evaluated = wrapped_run(model, method, 20)
    expected, counts = by_blocks(model, background, computes, 20)
    agrees("profilingdit", "paper, as a loop", outs, expected, 0.0, (evaluated, counts))
    plain = torch.stack([model(x, t) for x, t in samples(20)])
    assert torch.equal(outs[computes], plain[computes]) and not torch.equal(outs, plain)


def test_the_decreasing_interval_follows_its_formula():
    when = Decreasing(8, 3, warmup=6)
    expected = []
    for s in range(STEPS):
        exact = 8 - (8 - 3) * (s - 6) / (STEPS - 6)
        if s < 6 or s % math.floor(exact + 0.5) == 0:
            expected.append(s)
    assert computed_steps(when, STEPS) == expected
    gaps = [b - a for a, b in pairwise(expected)]
    assert max(gaps) == 10 and gaps[-2:] == [4, 4]  # `mod` may pass over a shorter interval
    assert computed_steps(Decreasing(5, 5, warmup=0), 23) == [0, 5, 10, 15, 20]
    assert computed_steps(Decreasing(1, 1), 7) == list(range(7))
    assert computed_steps(Decreasing(8, 3, 6, total=STEPS), 30) == [s for s in expected if s < 30]


def tiny(name, **depths):
    case = cases()[name]
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, case.cls)(**{**case.config, **depths})
    return case, randomize(model, 0, gain=0.3).eval().requires_grad_(False)


def test_the_published_wan_list_runs_28_of_40_blocks_less():
    case, model = tiny("WanTransformer3DModel", num_layers=40)
    method = ProfilingDiT.published("wan2.1-14b", model="")
    runs = method.parts().blocks
    assert len(runs) == 5
    with diffcache.wrapped(model, method) as handle, torch.no_grad():
        for step in range(14):
            model(**case.kwargs(model, 0, step=step, steps=STEPS), return_dict=False)
        evaluated = [call.counts["blocks"][0] for call in handle.last.calls]
        layout = reuse_in(handle).setup.layouts
    assert evaluated == ([40] * 6 + ([40] + [12] * 5) * 8)[:14]
    (found,) = layout.values()
    skipped = [i for i, tap in enumerate(found.skip["blocks"]) if tap is not model.blocks[i]]
    assert skipped == WAN


def test_the_published_hunyuan_lists_have_two_schedules():
    case, model = tiny("HunyuanVideoTransformer3DModel", num_layers=20, num_single_layers=40)
    method = ProfilingDiT.published("hunyuanvideo", model="")
    when = method.parts().when
    assert isinstance(when, Table) and when.total == 50
    double = {*range(6), *range(6, STEPS, 6)}
    single = {*range(6), 6, 18, 26, 32, 38, 42, 46, 48}
    with diffcache.wrapped(model, method) as handle, torch.no_grad():
        for step in range(20):
            out = model(**case.kwargs(model, 0, step=step, steps=STEPS), return_dict=False)[0]
        calls = handle.last.calls
    for site in when.sites:
        computed = {s for s in range(STEPS) if when.computes_at(Step(s, total=STEPS), site)}
        assert computed == (single if site.startswith("single") else double)
    assert out.isfinite().all()
    assert len(SINGLE) == 24
    for index, call in enumerate(calls):
        assert call.counts["transformer_blocks"][0] == (20 if index in double else 6)
        assert call.counts["single_transformer_blocks"][0] == (40 if index in single else 16)


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


def test_attention_without_an_axis_of_heads_is_of_one_head() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model, collector = nn.ModuleList([Plain()]), Noted()
    token = CURRENT.set(SimpleNamespace(step=Step(0, total=1)))
    with tracing._AttentionMode(model, [collector], ["0"]):  # type: ignore[list-item]
        model[0](torch.ones(2, 5, 8))
    CURRENT.reset(token)
    assert collector.calls[0][1].shape == (2, 1, 5, 8)


def test_token_grids_follow_from_shapes_and_counts():
    assert token_grid((1, 30, 8), 36) == (1, 30, 1, 1)
    assert token_grid((1, 30, 8), 20) is None
    assert token_grid((1, 4, 2, 8, 8), 32) == (2, 16, 1, 2)  # Wan: patches of 1 x 2 x 2
    assert token_grid((1, 4, 2, 8, 8), 38) == (2, 16, 1, 2)  # and six tokens of text
    assert token_grid((1, 4, 8, 8), 64) == (1, 64, 1, 1)
    film = torch.arange(2 * 4 * 6).reshape(1, 1, 2, 4, 6).float()
    cut = patches(film, (2, 6, 1, 2))
    assert cut[0, 1].tolist() == [2, 3, 8, 9] and cut[0, 6].tolist() == [24, 25, 30, 31]
