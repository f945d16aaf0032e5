"""PAB: a Wan and a FLUX model, step by step against the hooks of diffusers."""

import pytest
import torch

import diffcache
from diffcache.errors import AttachError
from diffcache.features.pab import PAB
from diffcache.step import Step
from tests.internals import reuse_in
from tests.zoo.catalog import cases
from tests.zoo_runs import sample

STEPS = 12


@pytest.mark.parametrize("cls", ["WanTransformer3DModel", "FluxTransformer2DModel"])
def test_peer_pab_step_by_step(cls, agrees):
    from diffusers import PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast

    case = cases()[cls]
    model, theirs, index = case.build(), case.build(), 0
    plain = sample(case, model, STEPS)
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=(100, 800),
        cross_attention_timestep_skip_range=(100, 800),
        current_timestep_callback=lambda: 1000 * (1 - index / STEPS),
    )
    apply_pyramid_attention_broadcast(theirs, config)
    expected = []
    with torch.no_grad():
        for index in range(STEPS):
            given = case.kwargs(model, 0, step=index, steps=STEPS)
            expected.append(theirs(**given, return_dict=False)[0].clone())
    with diffcache.wrapped(model, PAB(cross_every=3)) as handle:
        with diffcache.run(model, steps=STEPS):
            found = sample(case, model, STEPS)
        kinds = set(reuse_in(handle).setup.kinds.values())
    assert kinds == ({"self", "cross"} if cls.startswith("Wan") else {"self"})
    is_whole = [torch.equal(*pair) for pair in zip(found, plain, strict=True)]
    theirs = [torch.equal(*pair) for pair in zip(expected, plain, strict=True)]
    agrees("pab", "diffusers, run", found, expected, 0.0, (is_whole, theirs))
    for index in range(STEPS):  # 3 to 10 are inside 0.2 to 0.9 of the run
        within = 3 <= index <= 10 and (index % 2 or (index % 3 and len(kinds) > 1))
        assert is_whole[index] == (not within)


def test_a_run_of_unknown_length_is_refused():
    when = PAB().parts().when
    assert [i for i in range(10) if when.computes_at(Step(i, total=10), "self")] == [0, 1, 2, 4, 6, 8, 9]
    assert when.computes_at(Step(7, total=10), "of another kind")
    with pytest.raises(AttachError, match=r"length nobody said.*diffcache.run\(model, steps="):
        when.computes_at(Step(3), "self")
