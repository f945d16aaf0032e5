"""RegionE: the plan of a run, tokens and ratios; on and off a pipeline, against a dense loop with stale keys."""

import copy
import importlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.api import wrapped
from diffcache.attach.attention import DoorProcessor
from diffcache.attach.pipeline_hooks import tap_scheduler
from diffcache.errors import AttachError, TablesError
from diffcache.features.collect import RunInfo
from diffcache.features.regione import MODELS, RegionE
from diffcache.features.tables import Tables
from diffcache.step import Step
from tests.features.region_pipelines import (
    SIZE,
    STEPS,
    TOKENS,
    kontext,
    kontext_call,
    latents_of,
    method,
    qwen,
    qwen_call,
)
from tests.internals import state_of
from tests.zoo_runs import in_threads


def kontext_times(steps: int = 28) -> list[float]:
    """Return the timesteps of FLUX.1-Kontext at 1024 x 1024."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=1.15)
    times: list[float] = scheduler.timesteps.tolist()
    return times


def tables(steps: int, gamma: torch.Tensor | None = None, method: str = "regione") -> Tables:
    gamma = torch.full((steps - 1,), 1.01) if gamma is None else gamma
    return Tables({"method": method, "steps": steps}, {"gamma": gamma})


def decayed(plan, times):
    """Return skipped steps and factors: the paper's rule, written as a while loop per segment."""
    found, last = {}, {}
    for i in range(1, len(times)):
        r = plan.gamma[i - 1] * (1 - (times[i - 1] - times[i]) / 1000)
        full = i <= plan.warmup or i in plan.refresh or i >= plan.total - plan.post
        history = [*last.get(i - 1, []), r]
        if not full and r < 1 and 1 - np.prod(history) <= plan.decay:
            last[i] = history
            found[i] = r if plan.official else float(np.prod(history))
    return found


def test_the_stages_of_28_steps_are_the_published_ones() -> None:
    plan = RegionE().plan()
    phases = [plan.phase(i) for i in range(28)]
    assert phases[:5] == ["full"] * 5
    assert [i for i, phase in enumerate(phases) if phase == "store"] == [5, 15]
    assert phases[6:15] == ["region"] * 9
    assert phases[16:26] == ["region"] * 10
    assert phases[26:] == ["full"] * 2
    assert plan.regions == {*range(6, 15), *range(16, 26)}
    assert RegionE(refresh=(7, 24)).plan().refresh == (7, 24)  # the first and last places that are allowed
    assert RegionE(refresh=()).plan().regions == frozenset(range(6, 26))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("official", [True, False])
def test_skips_follow_the_decay(model: str, official: bool) -> None:
    plan = RegionE(model, official=official).plan()
    times = kontext_times()
    skips = plan.skips(times)
    assert skips == pytest.approx(decayed(plan, times))
    assert skips
    assert set(skips) <= plan.regions - {6}


def test_float16_ratios_compute_one_step_less_than_float32_ones() -> None:
    plan = RegionE("flux-kontext").plan()
    exact = replace(plan, gamma=MODELS["flux-kontext"].ratios)
    times = kontext_times()
    assert set(plan.skips(times)) - set(exact.skips(times)) == {10}
    assert plan.gamma != exact.gamma


@pytest.mark.parametrize("steps", [7, 10, 20, 28, 50, 100])
def test_stages_scale_with_the_number_of_steps(steps: int) -> None:
    plan = RegionE(tables=tables(steps)).plan()
    phases = [plan.phase(i) for i in range(steps)]
    assert plan.total == steps == RegionE(tables=tables(steps)).parts().when.total
    assert phases.count("store") == 2
    assert phases.index("store") + 1 == plan.warmup == max(1, round(6 * steps / 28))
    assert phases[-plan.post :] == ["full"] * max(1, round(2 * steps / 28))
    assert RegionE().parts().when.total == 28


def run_of(collector, number: int, steps: int, curve: torch.Tensor, edited: torch.Tensor) -> None:
    """Drive a collector through a run whose velocity has the norms of `curve` on edited tokens."""
    times = torch.linspace(1000, 1000 / steps, steps)
    sigmas = torch.cat([times / 1000, torch.zeros(1)])
    collector.begin(RunInfo(0, number, times, sigmas, steps))
    generator = torch.Generator().manual_seed(number)
    reference = torch.randn(*edited.shape, 4, generator=generator)
    direction = torch.where(edited[..., None], reference, -reference)
    for i in range(steps):
        step = Step(i, float(times[i]) / 1000, steps)
        velocity = torch.where(edited[..., None], curve[i] * direction, 3.0 ** (i % 2) * direction)
        # where it is not edited the clean estimate is the reference, elsewhere its opposite
        sample = sigmas[i] * velocity + torch.where(edited[..., None], -reference, reference)
        collector.output(step, torch.cat([sample, reference], dim=1), velocity)
        collector.guided(step, sample, velocity)
    collector.end()


@pytest.mark.parametrize("steps", [10, 28])
def test_the_fit_finds_the_ratios_of_a_known_decay(steps: int) -> None:
    collector = RegionE(threshold=0.5).collector()
    lengths = 1 - 1 / steps
    gamma = 1 + 0.1 * torch.rand(steps - 1, dtype=torch.float64)
    curve = torch.cat([torch.ones(1), torch.cumprod(gamma * lengths, 0)]).float()
    edited = torch.zeros(2, 9, dtype=torch.bool)
    edited[0, 2:5], edited[1, 0] = True, True
    run_of(collector, 0, steps, curve, edited)
    again = RegionE(threshold=0.5).collector()
    again.load(collector.state())
    edited[1] = False  # a sample without an edit counts for nothing
    run_of(again, 1, steps, curve, edited)
    assert again.settings() == {"threshold": 0.5, "samples": 3}
    found = again.tables()["gamma"]
    torch.testing.assert_close(found, gamma, rtol=1e-5, atol=0)
    plan = RegionE(tables=tables(steps, found)).plan()
    assert plan.gamma == pytest.approx(gamma.tolist(), rel=1e-5)


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def small_qwen(monkeypatch: pytest.MonkeyPatch) -> None:
    # the pipeline brings every reference to a megapixel, which is a constant in its source
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit as module

    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: (SIZE, SIZE, None))


class Dense:
    """RegionE as it should be, on a pipeline that is not wrapped, with every row computed always.

    Attention of the model itself is watched where it is dispatched: on a full step its keys and
    values are noted, on a region step those of rows that are not edited are replaced by the noted
    ones. What rows that are not edited return is thrown away.
    """

    def __init__(self, pipe: Any, method: RegionE, branches: int, module: Any, patch: Any) -> None:
        self.pipe, self.plan, self.branches = pipe, method.plan(), branches
        self.index, self.branch, self.calls = -1, 0, 0
        self.notes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.full: dict[int, Tensor] = {}
        self.last: dict[int, Tensor] = {}
        self.mask: Tensor | None = None
        self.real = module.dispatch_attention_fn
        patch.setattr(module, "dispatch_attention_fn", self.attend)
        self.hooks = [
            pipe.transformer.register_forward_pre_hook(self.before, with_kwargs=True),
            pipe.transformer.register_forward_hook(self.after),
        ]
        step = pipe.scheduler.step
        patch.setattr(pipe.scheduler, "step", lambda *args, **kw: (self.stepping(*args), step(*args, **kw))[1])

    def before(self, module: Any, args: Any, kwargs: Any) -> None:
        self.branch = self.calls % self.branches
        self.index += self.branch == 0
        self.calls += 1
        self.visit = 0
        self.seen = kwargs["hidden_states"]

    @property
    def skips(self) -> dict[int, float]:
        return self.plan.skips(self.pipe.scheduler.timesteps.tolist())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        place = (self.branch, self.visit)
        self.visit += 1
        phase = self.plan.phase(self.index)
        if phase == "store":
            self.notes[place] = key.clone(), value.clone()
        if phase == "region":
            text = key.shape[1] - 2 * TOKENS
            stale = torch.cat([~self.mask, torch.ones_like(self.mask)], dim=1)
            stale = torch.cat([torch.zeros(len(stale), text, dtype=torch.bool), stale], dim=1)
            old_key, old_value = self.notes[place]
            key = torch.where(stale[..., None, None], old_key, key)
            value = torch.where(stale[..., None, None], old_value, value)
        return self.real(query, key, value, **more)

    def after(self, module: Any, args: Any, out: tuple[Tensor]) -> tuple[Tensor]:
        fresh, phase = out[0][:, :TOKENS], self.plan.phase(self.index)
        if phase == "store":
            self.full[self.branch] = fresh
        if phase == "region":
            edited = self.mask[..., None]
            if self.index in self.skips:
                fresh = self.skips[self.index] * self.last[self.branch]
            fresh = torch.where(edited, fresh, self.full[self.branch])
        if self.index not in self.skips:
            self.last[self.branch] = fresh
        return (torch.cat([fresh, out[0][:, TOKENS:]], dim=1),)

    def stepping(self, velocity: Tensor, timestep: Tensor, sample: Tensor) -> None:
        if self.index != self.plan.split:
            return
        clean = sample - self.pipe.scheduler.sigmas[self.index] * velocity
        reference = self.seen[:, TOKENS:]
        cosine = (clean * reference).sum(-1) / (clean.norm(dim=-1) * reference.norm(dim=-1))
        mask = (cosine <= self.plan.threshold).unflatten(1, (8, 8))
        if self.plan.morphology:
            cross = torch.tensor([[0.0, 1, 0], [1, 1, 1], [0, 1, 0]])[None, None]
            count = torch.conv2d(mask[:, None].float(), cross, padding=1)
            grown = torch.conv2d((count == 5).float(), torch.ones(1, 1, 5, 5), padding=2)
            mask = grown[:, 0] > 0
        self.mask = mask.flatten(1)


Case = tuple[Callable[[], Any], Callable[[], dict[str, Any]], int, str]
FLUX = "diffusers.models.transformers.transformer_flux"
QWEN = "diffusers.models.transformers.transformer_qwenimage"
CASES: dict[str, Case] = {
    "kontext": (kontext, kontext_call, 1, FLUX),
    "kontext, true CFG": (kontext, lambda: kontext_call(guided=True), 2, FLUX),
    "kontext, two samples": (kontext, lambda: kontext_call((0, 2)), 1, FLUX),
    "qwen": (qwen, qwen_call, 2, QWEN),
    "qwen, reference at time 0": (lambda: qwen(zero_cond_t=True), qwen_call, 2, QWEN),
}
METHODS: dict[str, dict[str, Any]] = {
    "published rule": {},
    "nothing skipped": {"threshold": 0.1, "decay": -1.0},
    "morphology": {"threshold": 0.2, "morphology": True, "official": False, "decay": 0.2, "refresh": (10, 20)},
    "all edited": {"threshold": 2.0, "morphology": True, "decay": -1.0, "warmup": 1, "refresh": ()},
}
FEW = ("kontext, two samples", "qwen")  # for the methods that say little more


@cache
def built(case: str) -> Any:
    return CASES[case][0]()


@pytest.mark.usefixtures("small_qwen")
@pytest.mark.parametrize(("case", "kind"), [(c, k) for k in METHODS for c in CASES if k.startswith("pub") or c in FEW])
def test_runs_are_those_of_the_dense_loop(case: str, kind: str, monkeypatch: Any, agrees: Any) -> None:
    _, call, branches, where = CASES[case]
    pipe = built(case)
    chosen = method(pipe, **METHODS[kind])
    with monkeypatch.context() as patch:
        dense = Dense(pipe, chosen, branches, importlib.import_module(where), patch)
        wanted = pipe(**call())[0]
    for hook in dense.hooks:
        hook.remove()
    assert dense.index == STEPS - 1
    assert dense.mask is not None
    if kind != "all edited":
        counts = dense.mask.sum(dim=1).tolist()
        assert all(0 < count < TOKENS for count in counts)
        assert len(set(counts)) == len(counts)
    with wrapped(pipe, chosen) as handle:
        made = pipe(**call())[0]
        again = pipe(**call())[0]
        calls = handle.last.calls
    steps = {c.index for c in calls if not c.computed}, set(dense.skips)
    agrees("regione", "paper, as a loop over all tokens", [made], [wanted], 1e-4, steps)
    assert torch.equal(made, again)
    assert bool(dense.skips) == (chosen.plan().decay > 0)
    most, samples = int(dense.mask.sum(dim=1).max()), len(dense.mask)
    for c in calls:
        region = chosen.plan().phase(c.index) == "region"
        text = 6 if case.startswith("kontext") or c.branch in (0, "cond") else 5
        present = samples * (text + (most if region else 2 * TOKENS)) * c.computed
        assert c.counts["tokens"] == (present, samples * (text + 2 * TOKENS) - present)
        ran, saved = c.flops
        assert ran / (ran + saved) == pytest.approx(present / (samples * (text + 2 * TOKENS)))


@pytest.mark.usefixtures("small_qwen")
@pytest.mark.parametrize("case", ["kontext, two samples", "qwen"])
def test_where_nothing_is_edited_no_block_runs_and_all_rows_jump(case: str) -> None:
    build, call, branches, _ = CASES[case]
    pipe = build()
    runs: list[int] = []
    blocks = pipe.transformer.transformer_blocks
    blocks[0].register_forward_hook(lambda *_: runs.append(1))
    with wrapped(pipe, method(pipe, threshold=-2.0)):
        seen = latents_of(pipe, call())
    sigmas = pipe.scheduler.sigmas
    assert len(runs) == branches * 5
    for first, last in ((2, 6), (6, 11)):
        velocity = (seen[first] - seen[first - 1]) / (sigmas[first + 1] - sigmas[first])
        jump = seen[first - 1] + (sigmas[last] - sigmas[first]) * velocity
        torch.testing.assert_close(seen[last - 1], jump, rtol=1e-3, atol=1e-4)


def test_a_sample_without_edits_moves_straight_beside_one_with() -> None:
    pipe = kontext()
    call = kontext_call((0, 1))
    with wrapped(pipe, method(pipe, threshold=-2.0)):
        straight = latents_of(pipe, kontext_call((0,)))
    with wrapped(pipe, method(pipe, threshold=2.0)) as handle:
        extension = handle.denoisers[0].extensions[1]
        choose = extension.stepping

        def none_of_the_first(run: Any, *given: Any) -> None:
            from diffcache.features.parts.region_mask import rows_of

            choose(run, *given)
            progress = run.storage[extension]
            if progress.mask is not None and progress.mask[0].any():
                progress.mask[0] = False
                progress.rows = rows_of(progress.mask)

        extension.stepping = none_of_the_first
        mixed = latents_of(pipe, call)
    torch.testing.assert_close(mixed[10][:1], straight[10], rtol=1e-4, atol=1e-5)


def test_threads_have_masks_and_stores_of_their_own() -> None:
    pipe, step = kontext(), threading.Barrier(2, timeout=60)

    def wait(pipe: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        step.wait()
        return given

    def draw(number: int) -> Tensor:
        mine = copy.copy(pipe)
        mine.__class__, mine.__dict__ = pipe.__class__, dict(pipe.__dict__)
        run, token = handle.begin(in_pipeline=True)
        mine.scheduler = copy.deepcopy(pipe.scheduler)
        tap_scheduler(mine.scheduler, handle)
        own = type(pipe).__call__.__wrapped__
        out = own(mine, **kontext_call((number,)), callback_on_step_end=wait)[0]
        handle.end(run, token, True)
        return out

    with wrapped(pipe, method(pipe)) as handle:
        alone = [pipe(**kontext_call((number,)))[0] for number in (0, 1)]
        assert all(map(torch.equal, in_threads(partial(draw, 0), partial(draw, 1)), alone))


def test_unwrapping_leaves_every_processor_and_module_as_it_was() -> None:
    pipe = kontext()
    wanted, before = pipe(**kontext_call())[0], state_of(pipe.transformer)
    diffcache.wrap(pipe, method(pipe))
    pipe(**kontext_call())
    twin = copy.deepcopy(pipe.transformer)
    assert any(isinstance(p, DoorProcessor) for p in pipe.transformer.attn_processors.values())
    assert not any(isinstance(p, DoorProcessor) for p in twin.attn_processors.values())
    diffcache.unwrap(pipe)
    assert state_of(pipe.transformer) == before
    assert torch.equal(pipe(**kontext_call())[0], wanted)


def test_an_exception_in_a_region_step_leaves_nothing_behind() -> None:
    pipe = kontext()
    with wrapped(pipe, method(pipe)):
        wanted = pipe(**kontext_call())[0]

        def stop(pipe: Any, index: int, *given: Any) -> Any:
            if index == 4:
                raise KeyboardInterrupt
            return given[-1]

        with pytest.raises(KeyboardInterrupt):
            pipe(**kontext_call((1,)), callback_on_step_end=stop)
        assert torch.equal(pipe(**kontext_call())[0], wanted)


def test_all_rows_are_computed_behind_a_prompt_that_a_callback_changes() -> None:
    pipe = kontext()

    def change(pipe: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {name: -held if index == 3 else held for name, held in given.items()}

    with wrapped(pipe, method(pipe)) as handle:
        inputs = ["prompt_embeds"]
        pipe(**kontext_call(), callback_on_step_end=change, callback_on_step_end_tensor_inputs=inputs)
        third, fourth = (call.counts["tokens"] for call in handle.last.calls[3:5])
    assert third[1] > 0 == fourth[1]


def test_ratios_are_fitted_to_a_pipeline_and_serve_its_number_of_steps() -> None:
    pipe, steps = kontext(), 9
    calls = [{**kontext_call((number,)), "num_inference_steps": steps} for number in (0, 1)]
    ratios = []
    for call in calls:
        seen = latents_of(pipe, call)
        sigmas = pipe.scheduler.sigmas
        first = call["generator"][0].manual_seed(int(call["generator"][0].initial_seed()))
        start = torch.randn(1, 2, 16, 16, generator=first)
        start = pipe._pack_latents(start, 1, 2, 16, 16)
        points = torch.stack([start, *seen]).flatten(1).double()
        norms = (points.diff(dim=0) / sigmas.diff()[:, None]).norm(dim=1)
        ratios.append(norms[1:] / norms[:-1])
        call["generator"][0].manual_seed(call["generator"][0].initial_seed())
    wanted = sum(ratios) / 2 / (1 - 1 / steps)
    fitted = diffcache.calibrate(pipe, RegionE(threshold=2.0, decay=0.5), calls, steps=steps)
    assert isinstance(fitted.tables, Tables)
    torch.testing.assert_close(fitted.tables["gamma"], wanted, rtol=1e-3, atol=0)
    plan = fitted.plan()
    with wrapped(pipe, fitted) as handle:
        pipe(**calls[0])
        pipe(**calls[1])
    skipped = {call.index for call in handle.last.calls if not call.computed}
    assert skipped == set(plan.skips(pipe.scheduler.timesteps.tolist()))
    with pytest.raises(TablesError, match="measured on .* with config="):
        diffcache.wrap(kontext(layers=1), fitted)


def test_foreign_attention_is_refused() -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    pipe = kontext()
    attention = pipe.transformer.transformer_blocks[1].attn
    with wrapped(pipe, method(pipe)):
        mine = FluxAttnProcessor()
        attention.set_processor(mine)
        with pytest.raises(AttachError, match="3 of 4 attention modules took part"):
            pipe(**kontext_call())
    assert attention.processor is mine
