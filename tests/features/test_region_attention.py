"""RegionE on pipelines, against a dense loop that recomputes everything with stale keys."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.api import wrapped
from diffcache.attach.facts import facts_of
from diffcache.attach.region_attention import RowProcessor
from diffcache.attach.solver import tap_scheduler
from diffcache.errors import AttachError, TablesError
from diffcache.features.regione import RegionE
from diffcache.features.tables import Tables
from diffcache.pipelines.zoo.pipe import assemble, component, denoiser, flow_euler, noise, tiny_vae

SIZE = 32  # pixels a side; 8 x 8 noisy tokens, as many of the reference
TOKENS = 64
STEPS = 12


def method(pipe: Any, **settings: Any) -> RegionE:
    """Return RegionE for short runs: 0-2, 6 and 11 compute all tokens, 3-5 and 7-10 a part."""
    header = {"method": "regione", "steps": STEPS, **facts_of(pipe.transformer, pipe.scheduler)}
    tables = Tables(header, {"gamma": torch.full((STEPS - 1,), 1.08)})
    return RegionE(tables=tables, **{"threshold": 0.0, "morphology": False, **settings})


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def kontext() -> Any:
    model = denoiser("FluxTransformer2DModel", 0, num_layers=2, num_single_layers=2)
    return assemble("FluxKontextPipeline", flow_euler(), transformer=model, vae=tiny_vae(0, 2))


def kontext_call(which: tuple[int, ...] = (0,), guided: bool = False) -> dict[str, Any]:
    """Return the arguments for the samples numbered in `which`."""

    def drawn(seed: int, *shape: int) -> Tensor:
        return torch.cat([noise(100 * number + seed, 1, *shape) for number in which])

    made = {
        "image": drawn(5, 3, SIZE, SIZE).sigmoid(),
        "height": SIZE,
        "width": SIZE,
        "max_area": SIZE * SIZE,
        "_auto_resize": False,
        "num_inference_steps": STEPS,
        "output_type": "latent",
        "generator": [torch.Generator().manual_seed(number) for number in which],
        "prompt_embeds": drawn(1, 6, 24),
        "pooled_prompt_embeds": drawn(2, 12),
    }
    if guided:
        made |= {"negative_prompt_embeds": drawn(3, 6, 24), "true_cfg_scale": 2.0}
        made |= {"negative_pooled_prompt_embeds": drawn(4, 12)}
    return made


def qwen(zero_cond_t: bool = False) -> Any:
    model = denoiser("QwenImageTransformer2DModel", 0, num_layers=2, zero_cond_t=zero_cond_t)
    vae = component(
        "AutoencoderKLQwenImage",
        0,
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return assemble("QwenImageEditPipeline", flow_euler(), transformer=model, vae=vae)


def qwen_call() -> dict[str, Any]:
    from PIL import Image

    picture = (noise(9, SIZE, SIZE, 3).sigmoid() * 255).byte().numpy()
    return {
        "image": Image.fromarray(picture),
        "height": SIZE,
        "width": SIZE,
        "num_inference_steps": STEPS,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(0),
        "prompt_embeds": noise(1, 1, 6, 24),
        "prompt_embeds_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]),
        "negative_prompt_embeds": noise(3, 1, 5, 24),
        "negative_prompt_embeds_mask": torch.ones(1, 5, dtype=torch.long),
        "true_cfg_scale": 3.0,
    }


@pytest.fixture
def small_qwen(monkeypatch: pytest.MonkeyPatch) -> None:
    # the pipeline brings every reference to a megapixel, which is a constant in its source
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit as module

    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: (SIZE, SIZE, None))


class Dense:
    """What RegionE should do, on a pipeline that is not wrapped, with every row computed always.

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
        patch.setattr(
            pipe.scheduler, "step", lambda *args, **kw: (self.stepping(*args), step(*args, **kw))[1]
        )

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
    "morphology": {
        "threshold": 0.2,
        "morphology": True,
        "official": False,
        "decay": 0.2,
        "refresh": (10, 20),
    },
    "all edited": {
        "threshold": 2.0,
        "morphology": True,
        "decay": -1.0,
        "warmup": 1,
        "refresh": (),
    },
}
FEW = ("kontext, two samples", "qwen")  # for the methods that say little more


@pytest.mark.usefixtures("small_qwen")
@pytest.mark.parametrize(
    ("case", "kind"),
    [(c, k) for k in METHODS for c in CASES if k.startswith(("pub", "all")) or c in FEW],
)
def test_runs_are_those_of_the_dense_loop(case: str, kind: str, monkeypatch: Any) -> None:
    build, call, branches, where = CASES[case]
    pipe = build()
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
    torch.testing.assert_close(made, wanted, rtol=2e-4, atol=2e-5)
    assert torch.equal(made, again)
    assert {c.index for c in calls if not c.computed} == set(dense.skips)
    assert bool(dense.skips) == (chosen.plan().decay > 0)
    most, samples = int(dense.mask.sum(dim=1).max()), len(dense.mask)
    for c in calls:
        region = chosen.plan().phase(c.index) == "region"
        text = 6 if case.startswith("kontext") or c.branch in (0, "cond") else 5
        present = samples * (text + (most if region else 2 * TOKENS)) * c.computed
        assert c.counts["tokens"] == (present, samples * (text + 2 * TOKENS) - present)
        ran, saved = c.flops
        assert ran / (ran + saved) == pytest.approx(present / (samples * (text + 2 * TOKENS)))


def latents_of(pipe: Any, call: dict[str, Any]) -> list[Tensor]:
    """Return the latents behind every step."""
    seen: list[Tensor] = []

    def note(pipe: Any, index: int, timestep: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(given["latents"].clone())
        return given

    pipe(**call, callback_on_step_end=note)
    return seen


def test_steps_before_the_first_region_step_are_the_uncached_ones() -> None:
    pipe = kontext()
    plain = latents_of(pipe, kontext_call(guided=True))
    with wrapped(pipe, method(pipe)):
        cached = latents_of(pipe, kontext_call(guided=True))
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], cached[:3], strict=True))
    assert not torch.equal(plain[3], cached[3])


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


def test_samples_of_a_batch_are_those_drawn_alone_whatever_the_others_edit() -> None:
    pipe = kontext()
    with wrapped(pipe, method(pipe)):
        both = pipe(**kontext_call((0, 1)))[0]
        alone = torch.cat([pipe(**kontext_call((number,)))[0] for number in (0, 1)])
    torch.testing.assert_close(both, alone, rtol=2e-4, atol=2e-5)


def test_a_sample_without_edits_moves_straight_beside_one_with() -> None:
    pipe = kontext()
    call = kontext_call((0, 1))
    with wrapped(pipe, method(pipe, threshold=-2.0)):
        straight = latents_of(pipe, kontext_call((0,)))
    with wrapped(pipe, method(pipe, threshold=2.0)) as handle:
        extension = handle.engines[0].extensions[0]
        choose = extension.stepping

        def none_of_the_first(run: Any, *given: Any) -> None:
            from diffcache.features.region_mask import rows_of

            choose(run, *given)
            progress = run.extras[extension]
            if progress.mask is not None and progress.mask[0].any():
                progress.mask[0] = False
                progress.rows = rows_of(progress.mask)

        extension.stepping = none_of_the_first
        mixed = latents_of(pipe, call)
    torch.testing.assert_close(mixed[10][:1], straight[10], rtol=1e-4, atol=1e-5)


def test_threads_have_masks_and_stores_of_their_own() -> None:
    pipe = kontext()
    found: dict[int, Tensor] = {}
    with wrapped(pipe, method(pipe)) as handle:
        alone = [pipe(**kontext_call((number,)))[0] for number in (0, 1)]
        step = threading.Barrier(2, timeout=60)

        def draw(number: int) -> None:
            mine = copy.copy(pipe)
            mine.__class__, mine.__dict__ = pipe.__class__, dict(pipe.__dict__)
            with torch.no_grad():
                found[number] = turns(mine, number)

        def turns(mine: Any, number: int) -> Tensor:
            def wait(pipe: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
                step.wait()
                return given

            run, token = handle.begin(in_pipeline=True)
            mine.scheduler = copy.deepcopy(pipe.scheduler)
            tap_scheduler(mine.scheduler, handle)
            out = (
                type(pipe)
                .__mro__[1]
                .__call__(mine, **kontext_call((number,)), callback_on_step_end=wait)[0]
            )
            handle.end(run, token, True)
            return out

        threads = [threading.Thread(target=draw, args=(number,)) for number in (0, 1)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert torch.equal(found[0], alone[0])
    assert torch.equal(found[1], alone[1])


def test_unwrapping_leaves_every_processor_and_module_as_it_was() -> None:
    pipe = kontext()
    wanted = pipe(**kontext_call())[0]
    before = {name: dict(vars(module)) for name, module in pipe.transformer.named_modules()}
    diffcache.wrap(pipe, method(pipe))
    pipe(**kontext_call())
    twin = copy.deepcopy(pipe.transformer)
    assert any(isinstance(p, RowProcessor) for p in pipe.transformer.attn_processors.values())
    assert not any(isinstance(p, RowProcessor) for p in twin.attn_processors.values())
    diffcache.unwrap(pipe)
    for name, module in pipe.transformer.named_modules():
        now = vars(module)
        assert now.keys() == before[name].keys()
        if "processor" in now:
            assert now["processor"] is before[name]["processor"]
    assert torch.equal(pipe(**kontext_call())[0], wanted)


def test_a_backend_set_on_a_wrapped_model_stays_behind() -> None:
    pipe = kontext()
    with wrapped(pipe, method(pipe)):
        pipe.transformer.set_attention_backend("native")
        pipe(**kontext_call())
    backends = {p._attention_backend for p in pipe.transformer.attn_processors.values()}
    assert {str(getattr(b, "value", b)) for b in backends} == {"native"}


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


@pytest.mark.parametrize("hold", ["bf16", "int8", "host"])
def test_velocities_held_smaller_decay_alike(hold: Any) -> None:
    pipe = kontext()
    with wrapped(pipe, method(pipe)) as handle:
        wanted = pipe(**kontext_call())[0]
        assert any(not call.computed for call in handle.last.calls)
    with wrapped(pipe, method(pipe), hold=hold):
        made = pipe(**kontext_call())[0]
    assert torch.equal(made, wanted) == (hold == "host")
    torch.testing.assert_close(made, wanted, rtol=0, atol=0.03)


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
    with pytest.raises(TablesError, match="measured with config"):
        diffcache.wrap(kontext_of_another_depth(), fitted)


def kontext_of_another_depth() -> Any:
    model = denoiser("FluxTransformer2DModel", 0, num_layers=1, num_single_layers=2)
    return assemble("FluxKontextPipeline", flow_euler(), transformer=model, vae=tiny_vae(0, 2))


# -------------------------------------------------------------------------------------- errors


def test_other_pipelines_and_bare_models_are_refused() -> None:
    model = denoiser("FluxTransformer2DModel", 0)
    pipe = assemble("FluxPipeline", flow_euler(), transformer=model)
    served = "serves FluxKontextPipeline, QwenImageEditPipeline"
    with pytest.raises(AttachError, match=f"FluxPipeline with FluxTransformer2DModel: .*{served}"):
        diffcache.wrap(pipe, RegionE())
    with pytest.raises(AttachError, match=f"{served}.*not a bare model"):
        diffcache.wrap(model, RegionE())
    assert not any(isinstance(p, RowProcessor) for p in model.attn_processors.values())


def test_other_schedulers_are_refused() -> None:
    from diffusers import FlowMatchHeunDiscreteScheduler

    pipe = kontext()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with pytest.raises(
        AttachError, match="needs FlowMatchEulerDiscreteScheduler, not FlowMatchHeu"
    ):
        diffcache.wrap(pipe, RegionE())
    pipe.scheduler = flow_euler(stochastic_sampling=True)
    with pytest.raises(AttachError, match="with stochastic_sampling"):
        diffcache.wrap(pipe, RegionE())
    pipe.scheduler = flow_euler()
    with wrapped(pipe, RegionE()):
        pipe.scheduler = flow_euler(stochastic_sampling=True)
        with pytest.raises(AttachError, match="with stochastic_sampling"):
            pipe(**kontext_call())


def test_another_number_of_steps_is_refused_naming_both() -> None:
    pipe = kontext()
    with wrapped(pipe, RegionE()), pytest.raises(AttachError, match="28 steps.*has 12"):
        pipe(**kontext_call())


def test_a_reference_is_needed_and_of_the_same_size() -> None:
    pipe = kontext()
    with wrapped(pipe, method(pipe)):
        with pytest.raises(AttachError, match="sees 64 noisy and 0 other tokens; pass image="):
            pipe(**{**kontext_call(), "image": None})
        with pytest.raises(AttachError, match="sees 64 noisy and 16 other tokens"):
            pipe(**{**kontext_call(), "image": torch.rand(1, 3, 16, 16)})


def test_foreign_attention_is_refused() -> None:
    from diffusers.models.transformers.transformer_flux import (
        FluxAttnProcessor,
        FluxIPAdapterAttnProcessor,
    )

    pipe = kontext()
    attention = pipe.transformer.transformer_blocks[1].attn
    attention.set_processor(FluxIPAdapterAttnProcessor(32, 24))
    with pytest.raises(AttachError, match=r"transformer_blocks.1.attn has FluxIPAdapterAttnProc"):
        diffcache.wrap(pipe, method(pipe))
    attention.set_processor(FluxAttnProcessor())
    with wrapped(pipe, method(pipe)):
        mine = FluxAttnProcessor()
        attention.set_processor(mine)
        with pytest.raises(AttachError, match="3 of 4 attention modules took part"):
            pipe(**kontext_call())
    assert attention.processor is mine
