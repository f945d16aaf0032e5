"""Caches over weights that torchao and quanto have quantized, on the shipped FLUX pipeline."""

import pytest
import torch

import diffcache
from diffcache import Interval, TaylorSeer
from diffcache.pipelines.load import Loading, load
from diffcache.pipelines.shipped_models import MODELS

PACKAGES = {"torchao-int8": "torchao", "quanto-int8": "optimum.quanto"}


def opened(**loading):
    pipe, call = load(str(MODELS / "sticker-flux"), loading=Loading(**loading))
    pipe.set_progress_bar_config(disable=True)

    def draw():
        noise = torch.Generator().manual_seed(0)
        given = {**call, "num_inference_steps": 6, "output_type": "latent"}
        return pipe("a fox left of an owl on grass", generator=noise, **given).images

    return pipe, draw


@pytest.mark.parametrize("quantize", PACKAGES)
def test_quantized_weights_are_cached_and_left_as_they_were(quantize):
    pytest.importorskip(PACKAGES[quantize])
    pipe, draw = opened(quantize=quantize)
    plain = draw()
    linear = pipe.transformer.transformer_blocks[0].attn.to_q
    assert type(linear) is not torch.nn.Linear or type(linear.weight) is not torch.nn.Parameter
    with diffcache.wrapped(pipe, Interval(every=1)):
        assert torch.equal(draw(), plain)
    method = TaylorSeer(every=3, order=1, warmup=1)
    with diffcache.wrapped(pipe, method):
        cached = draw()
        assert torch.equal(draw(), cached) and not torch.equal(cached, plain)
        done = diffcache.report(pipe)
    assert torch.equal(draw(), plain)
    pipe, draw = opened()
    with diffcache.wrapped(pipe, method):
        assert not torch.equal(draw(), cached)
        assert done.steps_computed == diffcache.report(pipe).steps_computed == 2
        assert done.flops_saved == diffcache.report(pipe).flops_saved > 0
