"""Tests that need a CUDA device: exactness there, and that static schedules never wait for it."""

import pytest
import torch

import diffcache
from tests.zoo.catalog import cases

pytestmark = pytest.mark.gpu
STEPS = 8


@pytest.fixture(scope="module")
def made():
    case = cases()["FluxTransformer2DModel"]
    model = case.build().cuda()
    sample(case, model)  # the first calls of a process may be given other algorithms
    return case, model


def kwargs_at(case, model, step):
    given = case.kwargs(model, 0, step=step, steps=STEPS)
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def sample(case, model, handle=None):
    outs = []
    with torch.no_grad():
        for step in range(STEPS):
            if handle is not None and step:
                handle.run().ticks += 1
            outs.append(model(**kwargs_at(case, model, step), return_dict=False)[0].clone())
    return torch.stack(outs)


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
@pytest.mark.parametrize("site", ["stack", "block", "module", "model"])
def test_off_is_bit_exact_and_on_repeats(made, site):
    case, model = made
    plain = sample(case, model)
    assert torch.equal(sample(case, model), plain), "the stock model does not repeat itself"
    with diffcache.wrapped(model, "taylorseer", every=1, site=site):
        assert torch.equal(sample(case, model), plain)
    with diffcache.wrapped(model, "taylorseer", every=3, site=site) as handle:
        first = sample(case, model)
        assert handle.last.skipped > 0
        assert torch.equal(sample(case, model), first)
    assert torch.equal(sample(case, model), plain)


@pytest.mark.parametrize("site", ["stack", "block", "module"])
def test_a_static_schedule_never_waits_for_the_device(made, site):
    case, model = made
    with diffcache.wrapped(model, "taylorseer", every=3, site=site) as handle, torch.no_grad():
        handle.restart(range(STEPS))
        calls = [kwargs_at(case, model, step) for step in range(STEPS)]
        conditions = calls[0].keys() - {case.timestep, *case.latents}
        for given in calls:  # as a sampling loop has them: others would be read, which waits
            given |= {name: calls[0][name] for name in conditions}
        try:
            for step, given in enumerate(calls):
                handle.run().ticks = step
                if step == 3:  # what is learned in the first calls may wait
                    torch.cuda.set_sync_debug_mode("error")
                model(**given, return_dict=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert handle.last.skipped > 0
