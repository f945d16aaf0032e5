"""Caching and quantizing each for itself, as a row beside the joint mode."""

import torch

import diffcache
from diffcache.eval.offline import inputs_of
from diffcache.eval.runs.task import Task
from diffcache.eval.separate import separate
from diffcache.features.cachequant import CacheQuant


def test_schedule_and_maps_are_those_of_float_runs_and_layers_are_plainly_rounded() -> None:
    torch.set_num_threads(1)
    inputs = inputs_of(Task("shapes-flux", samples=2, steps=6))
    tables = separate(inputs, 3, "w8a8", 6)
    dense = diffcache.calibrate(
        inputs.pipe, CacheQuant(every=3), inputs.prompts, steps=6, seed=inputs.seed, **inputs.call
    )
    kept = dense.measured()
    assert all(torch.equal(tables[name], kept[name]) for name in kept.names())
    assert any(name.startswith("quant/") for name in tables.names())
    assert not any(name.endswith(("/gain", "/shift")) for name in tables.names())
    method = CacheQuant(every=3, bits="w8a8", corrected=(), tables=tables)
    with diffcache.wrapped(inputs.pipe, method) as handle:
        inputs.pipe(inputs.prompts[:1], num_inference_steps=6, **inputs.call)
        computed = sorted({call.index for call in handle.last.calls if call.computed})
    assert computed == tables["starts"].tolist()
