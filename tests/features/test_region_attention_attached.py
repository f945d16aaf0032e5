"""RegionE on and off a pipeline: threads, exceptions, holds, calibration, and what it refuses."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.api import wrapped
from diffcache.attach.attention import DoorProcessor
from diffcache.attach.pipeline_hooks import tap_scheduler
from diffcache.errors import AttachError, TablesError
from diffcache.features.regione import RegionE
from diffcache.features.tables import Tables
from tests.features.region_pipelines import kontext, kontext_call, latents_of, method
from tests.zoo.pipe import assemble, denoiser, flow_euler, tiny_vae

pytestmark = pytest.mark.usefixtures("no_gradients")


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
            own = type(pipe).__call__.__wrapped__
            out = own(mine, **kontext_call((number,)), callback_on_step_end=wait)[0]
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
    assert any(isinstance(p, DoorProcessor) for p in pipe.transformer.attn_processors.values())
    assert not any(isinstance(p, DoorProcessor) for p in twin.attn_processors.values())
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
    with pytest.raises(TablesError, match="measured on .* with config="):
        diffcache.wrap(kontext_of_another_depth(), fitted)


def kontext_of_another_depth() -> Any:
    model = denoiser("FluxTransformer2DModel", 0, num_layers=1, num_single_layers=2)
    return assemble("FluxKontextPipeline", flow_euler(), transformer=model, vae=tiny_vae(0, 2))


def test_other_pipelines_and_bare_models_are_refused() -> None:
    model = denoiser("FluxTransformer2DModel", 0)
    pipe = assemble("FluxPipeline", flow_euler(), transformer=model)
    served = "serves FluxKontextPipeline, QwenImageEditPipeline"
    with pytest.raises(AttachError, match=f"FluxPipeline with FluxTransformer2DModel: .*{served}"):
        diffcache.wrap(pipe, RegionE())
    with pytest.raises(AttachError, match=f"{served}.*not a bare model"):
        diffcache.wrap(model, RegionE())
    assert not any(isinstance(p, DoorProcessor) for p in model.attn_processors.values())


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
