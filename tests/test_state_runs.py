"""One run after another, and runs that end early: each as in a fresh wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import diffcache
from diffcache.api import handle_of
from tests.internals import marks
from tests.zoo.pipe import noise
from tests.zoo_runs import EVERY, PIPES, SEER, run, wrapped_pipe

pytestmark = pytest.mark.usefixtures("quiet")


# one run after another ---------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "steps": lambda pipe: {"num_inference_steps": 8},
    "resolution": lambda pipe: {"height": 96, "width": 32},
    "batch": lambda pipe: {"num_images_per_prompt": 2},
    "prompt": lambda pipe: {"prompt_embeds": noise(9, 1, 6, 24)},
    "longer prompt": lambda pipe: {"prompt_embeds": noise(9, 1, 9, 24)},
    "dtype": lambda pipe: {"prompt_embeds": noise(1000, 1, 6, 24).double(), "pooled_prompt_embeds": noise(1005, 1, 12).double()} if pipe.transformer.double() else {},
    "scheduler": lambda pipe: _heun(pipe),
    "sigmas": lambda pipe: {"sigmas": [1.0, 0.8, 0.6, 0.3, 0.1], "num_inference_steps": 5},
}  # fmt: skip


def _heun(pipe: Any) -> dict[str, Any]:
    from diffusers import FlowMatchHeunDiscreteScheduler

    pipe.scheduler = FlowMatchHeunDiscreteScheduler.from_config({"shift": 3.0})
    return {}


@pytest.mark.parametrize(
    "method", [EVERY, SEER, diffcache.FirstBlock(threshold=5.0)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_run_equals_that_of_a_fresh_wrap(change: str, method: Any):
    name = "StableDiffusion3Pipeline" if change == "scheduler" else "FluxPipeline"
    used, fresh = wrapped_pipe(name, method), wrapped_pipe(name, method)
    run(used, name)
    out = run(used, name, **CHANGES[change](used))
    assert torch.isfinite(out).all()
    assert torch.equal(out, run(fresh, name, **CHANGES[change](fresh)))
    assert "s" in marks(used) and marks(used) == marks(fresh)


# runs that end early -----------------------------------------------------------------------------


def _callback(error: type[BaseException]) -> Callable[..., Any]:
    def callback(pipe: Any, step: int, t: Any, kwargs: Any) -> Any:
        if step == 3:
            raise error("stop here")
        return kwargs

    return callback


@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline"])
@pytest.mark.parametrize("how", ["callback", "keyboard", "hook", "block", "interrupt"])
def test_a_run_after_one_that_was_cut_short_equals_a_fresh_one(name: str, how: str):
    fresh = run(wrapped_pipe(name, SEER), name, seed=1)
    pipe = wrapped_pipe(name, SEER)
    handle = handle_of(pipe)
    if how in ("callback", "keyboard"):
        error = RuntimeError if how == "callback" else KeyboardInterrupt
        with pytest.raises(error, match="stop here"):
            run(pipe, name, callback_on_step_end=_callback(error))
    elif how == "interrupt":

        def stop(pipe: Any, step: int, t: Any, kwargs: Any) -> Any:
            pipe._interrupt = step >= 1
            return kwargs

        run(pipe, name, callback_on_step_end=stop)
        assert len(handle.last.calls) == 2 * PIPES[name].branches
    else:
        model = pipe.transformer
        blocks = model.transformer_blocks if name == "FluxPipeline" else model.blocks
        place = model.norm_out if how == "hook" else blocks[2]

        def fail(*_: Any) -> None:
            if len(handle.last.calls) >= 3 * PIPES[name].branches:
                raise RuntimeError("stop here")

        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stop here"):
            run(pipe, name)
        hook.remove()
    assert handle.held_bytes() == 0
    assert not handle.last.finished
    assert torch.equal(run(pipe, name, seed=1), fresh)
    assert handle.last.finished
