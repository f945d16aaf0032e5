"""Temporal tables on models and pipelines: exact in float over runs, close where rounded."""

from functools import partial

import pytest
import torch

import diffcache
from diffcache.attach.extensions.lookup import COUNTED
from diffcache.features.taylorseer import TaylorSeer
from diffcache.features.temporal_table import TemporalTable
from tests.features.temporal_toys import counts, table_of
from tests.internals import state_of
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes
from tests.zoo_runs import in_threads, sample

STEPS = 3
MODELS = {  # denoiser -> modules to look up
    "FluxTransformer2DModel": 14,
    "WanTransformer3DModel": 2,
    "DiTTransformer2DModel": 8,
    "UNet2DConditionModel": 23,
}
LIGHT = ["FluxTransformer2DModel", "DiTTransformer2DModel"]


@pytest.fixture(scope="module", params=MODELS)
def made(request):
    case = cases()[request.param]
    return case, case.build().requires_grad_(False)


class Calls:
    """Counts how often modules really run."""

    def __init__(self, model, paths):
        self.count = 0
        self.hooks = [
            model.get_submodule(path).register_forward_hook(self._count) for path in paths
        ]

    def _count(self, *_):
        self.count += 1

    def of(self, run, *args, **kwargs):
        self.count = 0
        return run(*args, **kwargs), self.count


def sites_of(case, model):
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, 1)
        return list(table_of(handle).taps)


def test_a_second_run_is_looked_up_bit_for_bit(made):
    case, model = made
    paths = sites_of(case, model)
    assert len(paths) == MODELS[case.name]
    plain, other = sample(case, model, STEPS), sample(case, model, STEPS, seed=1)
    assert plain.std() > 1e-3
    calls = Calls(model, paths)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, 1)  # learns what to tap, with a forward of its own
        first, ran = calls.of(sample, case, model, STEPS)
        assert torch.equal(first, plain)
        second, again = calls.of(sample, case, model, STEPS)
        assert torch.equal(second, plain)
        assert (again, ran > 0) == (0, True)
        assert counts(handle) == [(0, len(paths))] * STEPS
        assert torch.equal(
            sample(case, model, STEPS, order=range(STEPS - 1, -1, -1)), plain.flip(0)
        )
        assert counts(handle)[0] == (0, len(paths))
        assert torch.equal(
            sample(case, model, STEPS, seed=1), other
        )  # the latent, at least, differs
    for hook in calls.hooks:
        hook.remove()


def test_an_unknown_timestep_is_computed(made):
    case, model = made
    plain = sample(case, model, 4)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, STEPS)
        assert torch.equal(sample(case, model, 4), plain)
        number = MODELS[case.name]
        assert counts(handle) == [(0, number), *[(number, 0)] * 3]  # the first step is shared


def test_a_prompt_is_part_of_the_key_where_it_matters(made):
    case, model = made
    plain = sample(case, model, STEPS, seed=1)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, STEPS)
        assert torch.equal(sample(case, model, STEPS, seed=1), plain)
        looked_up = sum(hit for _, hit in counts(handle))
        timestep_only = case.name in ("WanTransformer3DModel", "UNet2DConditionModel")
        assert looked_up == (STEPS * MODELS[case.name] if timestep_only else 0)
        sample(case, model, STEPS)
        assert sum(ran for ran, _ in counts(handle)) == 0  # the first prompt is still known


@pytest.mark.parametrize("made", LIGHT, indirect=True)
@pytest.mark.parametrize(
    "inner",
    [None, TaylorSeer(every=2, warmup=1), TaylorSeer(2, warmup=1, site="stack")],
    ids=["alone", "taylorseer", "stack"],
)
def test_it_goes_with_another_method_and_leaves_no_trace(made, inner):
    case, model = made
    before, plain = state_of(model), sample(case, model, STEPS)
    expected = plain
    if inner is not None:
        with diffcache.wrapped(model, inner):
            expected = sample(case, model, STEPS)
    with diffcache.wrapped(model, TemporalTable(inner)) as handle:
        assert torch.equal(sample(case, model, STEPS), expected)
        assert torch.equal(sample(case, model, STEPS), expected)
        assert all(ran == 0 and hit > 0 for ran, hit in counts(handle))  # at skipped steps as well
    assert state_of(model) == before
    assert torch.equal(sample(case, model, STEPS), plain)


@pytest.mark.parametrize("made", LIGHT, indirect=True)
def test_off_an_exception_the_next_run_is_exact(made):
    case, model = made
    plain = sample(case, model, STEPS)
    last = list(model.children())[-1]
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, STEPS, order=[0, 1])
        hook = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sample(case, model, STEPS, order=[2])
        hook.remove()
        handle.reset()
        assert torch.equal(sample(case, model, STEPS), plain)
        assert torch.equal(sample(case, model, STEPS), plain)


@pytest.mark.parametrize("made", LIGHT, indirect=True)
def test_threads_share_a_table(made):
    case, model = made
    plains = [sample(case, model, STEPS, seed=seed) for seed in (0, 1)]

    def work(number):
        return [sample(case, model, STEPS, seed=number % 2) for _ in range(3)]

    with diffcache.wrapped(model, TemporalTable()) as handle:
        found = in_threads(*(partial(work, number) for number in range(4)))
        for number, outs in enumerate(found):
            assert all(torch.equal(out, plains[number % 2]) for out in outs)
        assert torch.equal(sample(case, model, STEPS), plains[0])
        assert counts(handle) == [(0, MODELS[case.name])] * STEPS


@pytest.mark.parametrize("name", ["DiTPipeline", "FluxPipeline", "WanPipeline"])
def test_in_a_pipeline(name):
    case = pipes()[name]
    plain = case.run(case.build(0))
    pipe = diffcache.wrap(case.build(0), TemporalTable())
    assert torch.equal(case.run(pipe), plain)
    assert torch.equal(case.run(pipe), plain)
    sites = diffcache.report(pipe).sites
    assert all(counted[COUNTED][0] == 0 < counted[COUNTED][1] for counted in sites.values())


def test_gradients_flow_and_nothing_is_kept():
    case = cases()["DiTTransformer2DModel"]
    model = case.build()
    kwargs = case.kwargs(model, 0, step=1, steps=STEPS)

    def gradient():
        model.zero_grad()
        model(**kwargs, return_dict=False)[0].square().mean().backward()
        return model.transformer_blocks[1].norm1.linear.weight.grad.clone()

    plain = gradient()
    with diffcache.wrapped(model, TemporalTable()) as handle:
        with torch.no_grad():
            model(**kwargs)
            model(**kwargs)
        assert counts(handle)[-1] == (0, 8)
        found = gradient()
        assert torch.equal(found, plain) and found.abs().max() > 0
        assert len(handle.last.calls) == 2  # it runs as if nothing were wrapped


def test_autocast_has_entries_of_its_own():
    case = cases()["DiTTransformer2DModel"]
    model = case.build()
    plain = sample(case, model, STEPS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = sample(case, model, STEPS)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        for _ in range(2):
            assert torch.equal(sample(case, model, STEPS), plain)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(sample(case, model, STEPS), cast)
        assert counts(handle) == [(0, 8)] * STEPS


@pytest.mark.parametrize("made", LIGHT, indirect=True)
def test_a_model_rounded(made):
    case, model = made
    plain = sample(case, model, STEPS)
    with diffcache.wrapped(model, TemporalTable(bits=16)) as handle:
        assert torch.equal(sample(case, model, STEPS), plain)
        found = sample(case, model, STEPS)
        assert counts(handle) == [(0, MODELS[case.name])] * STEPS
    assert torch.allclose(found, plain, atol=2e-3 * float(plain.abs().max()))
    assert not torch.equal(found, plain)
