"""Every tiny pipeline of the zoo: off is exact, on skips what the formula says, unwrap leaves no trace."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import diffcache
from diffcache.registry import MODELS
from diffcache.targets import handle_of
from tests.internals import traces
from tests.near_zero import TINY, near_zero
from tests.zoo.pipe import PipeCase
from tests.zoo.pipes import pipes

PIPES = pipes()
STEPS, EVERY = 5, 3

# How many times each denoiser is called in a run of `STEPS` steps, where it is not once a step and
# branch: a list of steps for each denoiser, each step the labels of its branches.
CALLS: dict[str, Any] = {
    # strength 0.6 and 0.8 start late
    "FluxImg2ImgPipeline": [[0]] * int(STEPS * 0.6 + 0.5),
    "FluxInpaintPipeline": [[0]] * int(STEPS * 0.8 + 0.5),
    # second-order solvers evaluate twice in all steps but the last
    "StableDiffusion3Pipeline-heun": [[0]] * (2 * STEPS - 1),
    "StableDiffusionPipeline-heun": [[0]] * (2 * STEPS - 1),
    # 4 evaluations in each of 3 Runge-Kutta steps, then one a step
    "StableDiffusionPipeline-pndm": [[0]] * (12 + STEPS - 3),
    # the skip-layer call comes in the steps with 0.1 < step / STEPS < 0.7
    "StableDiffusion3Pipeline-slg": [[0, 1] if 0.1 < s / STEPS < 0.7 else [0] for s in range(STEPS)],
    # guidance up to half of the steps
    "Lumina2Pipeline-truncated": [[0, 1] if s + 1 <= STEPS / 2 else [0] for s in range(STEPS)],
    # three frames enter one after the other, two steps apart
    "SkyReelsV2DiffusionForcingPipeline": [[0, 1]] * (STEPS + 2 * 2),
    "LTX2Pipeline": [[0, 1, 2]] * STEPS,
}
# Pipelines that a look at the first attention does not serve, and those of SeaCache.
REFUSED = {
    "DDIMPipeline": "down_blocks.0 has no attention module",
    "StableCascadeDecoderPipeline": "calls none of the attentions that were found",
    "StableDiffusionXLPipeline": "down_blocks.0 has no attention module",
}
NO_LEVELS = {
    "AnyFlowFARPipeline": "neither a flow's sigmas nor alphas_cumprod tell its noise levels",
    "Cosmos3OmniPipeline": "which lie on no grid that the call shows",
    "Lumina2Pipeline": "which lie on no grid that the call shows",  # text stands before the image
    "SkyReelsV2DiffusionForcingPipeline": f"the noise level of step {STEPS} is not known",
    "StableCascadeDecoderPipeline": "neither a flow's sigmas nor alphas_cumprod tell",
    "ZImagePipeline": "which lie on no grid that the call shows",
}
# Its frames go on after the steps that its scheduler announced, where MagCache's ratios are 1.
LONGER = {"SkyReelsV2DiffusionForcingPipeline"}
# Where the first attention is looked at: one pipeline of each kind, and those of a text list.
LOOKED = {
    *MODELS,
    *REFUSED,
    *NO_LEVELS,
    "BriaPipeline",
    "WanAnimatePipeline",
    "Lumina2Pipeline",
    "Kandinsky5T2VPipeline",
    "CogVideoXPipeline",
    "QwenImagePipeline",
} & set(PIPES)
# Runs of a pipeline that makes a video piece by piece.
RUNS = {"WanAnimatePipeline": 2, "AnyFlowFARPipeline": 2}
# Calls that write a KV cache between two runs: they are computed.
WRITES = {"AnyFlowFARPipeline": ([STEPS], [True])}
# The blocks of the denoisers whose evaluations are counted with hooks of our own.
BLOCKS = {
    "FluxPipeline": ("transformer_blocks", "single_transformer_blocks"),
    "FluxControlNetPipeline": ("transformer_blocks", "single_transformer_blocks"),
    "StableDiffusion3Pipeline-heun": ("transformer_blocks",),
    "WanPipeline": ("blocks",),
    "WanPipeline-two": ("blocks",),
    "StableDiffusionPipeline": ("down_blocks", "up_blocks"),
}


@cache
def plain(name: str) -> tuple[Any, torch.Tensor]:
    """Build a pipeline and run it uncached."""
    pipe = PIPES[name].build(0)
    return pipe, PIPES[name].run(pipe, 0, STEPS)


@pytest.fixture(params=sorted(PIPES), scope="module")
def case(request):
    yield PIPES[request.param]
    plain.cache_clear()


pytestmark = pytest.mark.usefixtures("quiet")


def denoisers(case: PipeCase, pipe: Any) -> dict[str, nn.Module]:
    return {name: getattr(pipe, name) for name in case.denoisers}


def schedule(case: PipeCase, pipe: Any) -> dict[str, list[list[int]]]:
    """The branches of every step of every denoiser, from the number of steps and the guidance."""
    if case.name in CALLS:
        return {case.denoisers[0]: CALLS[case.name]}
    steps = [list(range(case.branches))] * STEPS
    if len(case.denoisers) == 1:
        return {case.denoisers[0]: steps}
    late = sum(t < 0.5 * 1000 for t in pipe.scheduler.timesteps.tolist())
    return dict(zip(case.denoisers, (steps[late:], steps[:late]), strict=True))


def expected(steps: list[list[int]], every: int) -> list[bool]:
    """Return whether each denoiser call is computed: step 0, every, 2 every, and a branch's first."""
    seen: set[int] = set()
    made: list[bool] = []
    last = 0
    anchors: dict[int, int] = {}
    for index, branches in enumerate(steps):
        due = index == 0 or index - last >= every
        for branch in branches:
            late = branch in seen and anchors[branch] < last
            computes = due or branch not in seen or late
            if computes:
                anchors[branch] = index
            seen.add(branch)
            made.append(computes)
            if due:
                last = index
    return made


def count_blocks(case: PipeCase, pipe: Any) -> tuple[Counter, list]:
    """Hook every block and count its evaluations by denoiser."""
    counts: Counter = Counter()
    hooks = []
    for name, model in denoisers(case, pipe).items():
        blocks = [block for key in BLOCKS[case.name] for block in getattr(model, key)]
        blocks += [model.mid_block] if hasattr(model, "mid_block") else []
        for block in blocks:
            hooks.append(block.register_forward_hook(lambda *_, name=name: counts.update([name])))
    return counts, hooks


def test_every_3_skips_by_the_formula_repeats_and_leaves_no_trace(case: PipeCase):
    pipe, out = plain(case.name)
    before = traces(pipe)
    with diffcache.wrapped(pipe, diffcache.Interval(every=EVERY)) as handle:
        first = case.run(pipe, 0, STEPS)
        assert traces(pipe) != before
        for name, steps in schedule(case, pipe).items():
            calls = [call for call in handle.last.calls if call.denoiser == name]
            indices = [index for index, branches in enumerate(steps) for _ in branches]
            computed = expected(steps, EVERY)
            for _ in range(RUNS.get(case.name, 1) - 1):
                wrote, ran = WRITES.get(case.name, ([], []))
                indices, computed = indices + wrote + indices, computed + ran + computed
            assert [call.index for call in calls] == indices
            assert [call.computed for call in calls] == computed
            for call in calls:
                place = 1 if call.computed else 0
                assert all(both[place] == 0 < sum(both) for both in call.counts.values()), call
        assert handle.last.finished
        assert handle.held_bytes() == 0
        assert torch.equal(case.run(pipe, 0, STEPS), first)
        assert torch.isfinite(first).all() and not torch.equal(first, out)
    assert traces(pipe) == before
    with pytest.raises(diffcache.AttachError, match="not wrapped"):
        handle_of(pipe)


def test_a_threshold_near_zero_computes_every_step(case: PipeCase):
    """Bit for bit, also after the test above, and gates leave no trace; or a gate is refused."""
    pipe, out = plain(case.name)
    before = traces(pipe)
    unlike = {"seacache"} if case.name in NO_LEVELS else set()
    groups = near_zero(*unlike, *({"magcache"} if case.name in LONGER else ()))
    if case.name not in LOOKED:
        del groups["modulated"]
    elif case.name in REFUSED:
        with (
            pytest.raises(diffcache.AttachError, match=REFUSED[case.name]),
            diffcache.wrapped(pipe, groups.pop("modulated")),
        ):
            case.run(pipe, 0, STEPS)
    if unlike:
        with (
            pytest.raises(diffcache.AttachError, match=NO_LEVELS[case.name]),
            diffcache.wrapped(pipe, "seacache", threshold=TINY),
        ):
            case.run(pipe, 0, STEPS)
    for methods in groups.values():
        with diffcache.wrapped(pipe, methods) as handle:
            assert torch.equal(case.run(pipe, 0, STEPS), out)
            assert handle.last.skipped == 0 < handle.last.computed
            methods.assert_computed()
    assert traces(pipe) == before


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_hooks_count_what_the_formula_says(name: str):
    case = PIPES[name]
    pipe = case.build(0)
    counts, hooks = count_blocks(case, pipe)
    depth = {part: len(hooks) // len(case.denoisers) for part in case.denoisers}
    case.run(pipe, 0, STEPS)
    steps = schedule(case, pipe)
    assert counts == {part: depth[part] * sum(map(len, steps[part])) for part in steps}

    with diffcache.wrapped(pipe, diffcache.Interval(every=EVERY)) as handle:
        case.run(pipe, 0, STEPS)  # learns the wiring, at the price of more evaluations
        counts.clear()
        case.run(pipe, 0, STEPS)
    computed = {part: depth[part] * sum(expected(steps[part], EVERY)) for part in steps}
    assert counts == computed
    assert handle.last.computed == sum(computed.values())
    total = sum(depth[part] * sum(map(len, steps[part])) for part in steps)
    assert handle.last.skipped == total - sum(computed.values())
    for hook in hooks:
        hook.remove()


def test_components_by_name_or_names() -> None:
    pipe = pipes()["FluxPipeline"].build(0)
    for components in ("transformer", ["transformer"], ("transformer",)):
        with diffcache.wrapped(pipe, "interval", components=components) as handle:
            assert len(handle.denoisers) == 1


def test_a_denoiser_replaced_after_wrapping_is_said() -> None:
    case = pipes()["WanPipeline-two"]
    pipe = diffcache.wrap(case.build(0), "interval")
    pipe.transformer_2 = case.build(1).transformer_2
    with pytest.warns(diffcache.CacheWarning, match="transformer_2 is another WanTransformer3DModel than when"):
        case.run(pipe)
    report = diffcache.report(pipe)
    assert list(report.sites) == ["transformer"] and len(report.remarks) == 1
    case.run(diffcache.wrap(diffcache.unwrap(pipe), "interval"))
    report = diffcache.report(pipe)
    assert list(report.sites) == list(case.denoisers) and not report.remarks
