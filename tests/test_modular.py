"""Modular pipelines of diffusers: wrapped like others, and left as they were."""

from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache import Interval
from diffcache.targets import handle_of
from tests.internals import marks
from tests.zoo_runs import PIPES, run

blocks = pytest.importorskip("diffusers.modular_pipelines.flux.modular_blocks_flux")
NAME, STEPS = "FluxPipeline", 6


def modular(plain: Any) -> Any:
    """Return the modular FLUX with the parts of a plain pipeline."""
    made = blocks.FluxCoreDenoiseStep().init_pipeline()
    made.update_components(transformer=plain.transformer, scheduler=plain.scheduler)
    return made


def drawn(pipe: Any, plain: Any) -> Tensor:
    call = PIPES[NAME].call(plain, 0, STEPS)
    call.pop("output_type")
    latents = pipe(**call, output="latents")
    tokens: Tensor = plain._pack_latents(latents, *latents.shape)  # as the plain pipeline has them
    return tokens


@pytest.fixture
def plain() -> Any:
    return PIPES[NAME].build(0)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["seacache", "lazycache"])
def test_noise_levels_are_known_in_a_modular_pipeline(plain: Any, name: str) -> None:
    settings = {"threshold": 1e9, "warmup": 2}
    with diffcache.wrapped(plain, name, **settings):
        expected = run(plain, NAME)
        assert marks(plain) == "CCsssC"
    pipe = modular(plain)
    with diffcache.wrapped(pipe, name, **settings):
        assert torch.equal(drawn(pipe, plain), expected)
        assert marks(pipe) == "CCsssC"


@pytest.mark.usefixtures("quiet")
def test_a_modular_pipeline_is_cached_like_the_plain_one(plain: Any) -> None:
    pipe = modular(plain)
    uncached = drawn(pipe, plain)
    assert torch.equal(uncached, run(plain, NAME))
    kept, cls, parts = dict(vars(pipe)), type(pipe), dict(vars(pipe.transformer))
    with diffcache.wrapped(plain, "taylorseer", every=3):
        expected = run(plain, NAME)
    assert diffcache.wrap(pipe, "taylorseer", every=3) is pipe
    found = drawn(pipe, plain)
    assert torch.equal(found, expected) and not torch.equal(found, uncached)
    assert marks(pipe) == "CCCssC"
    report = diffcache.report(pipe)
    assert report.finished and report.held_bytes == 0 < report.peak_bytes
    with diffcache.settings(pipe, every=1):
        assert torch.equal(drawn(pipe, plain), uncached)
    diffcache.unwrap(pipe)
    assert type(pipe) is cls and vars(pipe) == kept and vars(pipe.transformer) == parts
    assert torch.equal(drawn(pipe, plain), uncached)


@pytest.mark.usefixtures("quiet")
def test_parts_that_are_replaced_are_followed(plain: Any) -> None:
    """A new scheduler is listened to; blocks that fail in the midst leave nothing held."""
    pipe = diffcache.wrap(modular(plain), Interval(every=2))
    other = type(plain.scheduler).from_config(plain.scheduler.config, shift=1.0)
    pipe.update_components(scheduler=other)
    drawn(pipe, plain)
    assert marks(pipe) == "CsCsCs" and handle_of(pipe).schedulers == [other]
    held = []

    def fails(*_: Any) -> None:
        held.append(handle_of(pipe).held_bytes())
        if len(held) == 3:
            raise KeyError("in the midst")

    hook = pipe.transformer.norm_out.register_forward_hook(fails)
    with pytest.raises(KeyError, match="in the midst"):
        drawn(pipe, plain)
    hook.remove()
    assert held[2] > 0 == handle_of(pipe).held_bytes()
    diffcache.unwrap(pipe)
