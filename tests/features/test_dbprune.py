"""DBPrune: the blocks that run, and a loop over a model's blocks after cache-dit."""

import pytest
import torch

import diffcache
from diffcache.features.dbprune import DBPrune
from tests.internals import reuse_in
from tests.zoo.catalog import cases

STEPS = 10


def path(case, model):
    """Inputs of a run along a line between two samples, first slowly."""
    first, last = (case.kwargs(model, seed, step=0)["hidden_states"] for seed in (0, 1))
    for step in range(STEPS):
        share = (step / STEPS) ** 3
        given = case.kwargs(model, 0, step=step, steps=STEPS)
        yield {**given, "hidden_states": (1 - share) * first + share * last}


@pytest.mark.parametrize(("threshold", "lead", "warmup"), [(0.1, 0, 2), (0.3, 2, 1), (1e9, 1, 3)])
def test_peer_dbprune_step_by_step(threshold, lead, warmup, agrees):
    """A Wan model whose blocks are wrapped by hand: each keeps its input and what it adds."""
    case = cases()["WanTransformer3DModel"]
    model, theirs, now = case.build(), case.build(), [0]
    ran, kept = [], {}

    def pruned(block, number):
        run = block.forward

        def forward(hidden_states, *args, **kwargs):
            if number in kept and now[0] >= warmup and number >= lead:
                before, added = kept[number]
                if (hidden_states - before).abs().mean() / before.abs().mean() < threshold:
                    return hidden_states + added
            out = run(hidden_states, *args, **kwargs)
            kept[number] = hidden_states, out - hidden_states
            ran.append((now[0], number))
            return out

        block.forward = forward

    for number, block in enumerate(theirs.blocks):
        pruned(block, number)
    expected, found, counts = [], [], []
    with torch.no_grad():
        for now[0], given in enumerate(path(case, theirs)):
            expected.append(theirs(**given, return_dict=False)[0])
        method = DBPrune(threshold, lead=lead, warmup=warmup)
        with diffcache.wrapped(model, method) as handle, diffcache.run(model, steps=STEPS):
            found = [model(**given, return_dict=False)[0] for given in path(case, model)]
            assert handle.held_bytes() == 2 * (len(model.blocks) - lead) * stream_bytes(handle)
            counts = [call.counts["blocks"][0] for call in handle.last.calls]
    steps = counts, [sum(s == step for s, _ in ran) for step in range(STEPS)]
    agrees("dbprune", "cache-dit's code, as a loop", found, expected, 1e-5, steps)
    assert 0 < sum(counts) < STEPS * len(model.blocks)


def stream_bytes(handle):
    (tensor,) = {t.shape: t for t in handle.denoisers[0].tensors(handle.run())}.values()
    assert reuse_in(handle).setup.probe == "input"
    return tensor.nbytes
