"""Promises of every method of the catalogue, on small models of every kind."""

import warnings
from functools import cache

import pytest
import torch

import diffcache
from diffcache.catalog import make_method
from tests.internals import state_of
from tests.methods import ALONE, COMPUTED, OFF, ON, STEPS, TENSORS
from tests.zoo.catalog import cases
from tests.zoo_runs import sample

FIRST = [*range(4)]  # by the last of these every method that is on has skipped a step


@pytest.fixture(scope="module", params=ALONE)
def made(request):
    case = cases()[request.param]
    return case, case.build()


@pytest.fixture(params=OFF)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def plain(made):
    """Return the outputs of a model uncached."""
    return sample(*made, STEPS)


@pytest.fixture(scope="module")
def alone(made):
    """Return the outputs of a model in one run of a method with one seed, once for all tests."""
    case, model = made

    @cache
    def run(name, seed):
        with diffcache.wrapped(model, name, **ON[name]):
            return sample(case, model, STEPS, seed=seed)

    return run


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
def test_off_is_bit_exact_and_detaching_leaves_no_trace(made, plain, name):
    case, model = made
    before = state_of(model)
    assert plain.std() > 1e-3
    with diffcache.wrapped(model, name, **OFF[name]) as handle:
        assert torch.equal(sample(case, model, STEPS), plain)
        assert handle.last.skipped == 0
        handle.reset()  # starts a new run, which closes the record
    assert state_of(model) == before
    assert torch.equal(sample(case, model, STEPS, order=FIRST), plain[FIRST])


def test_on_skips_what_the_schedule_says_and_repeats(made, plain, alone, name):
    case, model = made
    with diffcache.wrapped(model, name, **ON[name]) as handle:
        other = sample(case, model, STEPS, seed=1)
        first = sample(case, model, STEPS)
        calls = handle.last.calls
        assert [call.index for call in calls if call.computed] == COMPUTED[name]
        assert [call.index for call in calls] == list(range(STEPS))
        assert torch.equal(first[COMPUTED[name]], plain[COMPUTED[name]])
        assert not torch.equal(first, plain)
        assert handle.last.skipped > 0
        assert not torch.equal(other, first)
    assert torch.equal(sample(case, model, STEPS, order=FIRST), plain[FIRST])
    assert torch.equal(alone(name, 0), first)


def test_two_branches_keep_two_features(made, alone, name):
    case, model = made
    expected = [alone(name, seed) for seed in (0, 1)]
    with diffcache.wrapped(model, name, **ON[name]) as handle, torch.no_grad():
        both = [[], []]
        for step in range(STEPS):
            for seed in (0, 1):
                kwargs = case.kwargs(model, seed, step=step, steps=STEPS)
                both[seed].append(model(**kwargs, return_dict=False)[0].clone())
        assert {call.branch for call in handle.last.calls} == {0, 1}
    for seed in (0, 1):
        assert torch.equal(torch.stack(both[seed]), expected[seed])


def test_an_aborted_run_leaves_nothing(made, alone, name):
    case, model = made
    fresh = alone(name, 0)
    with diffcache.wrapped(model, name, **ON[name]) as handle:
        for _ in range(2):
            handle.reset()
            assert handle.held_bytes() == 0
            sample(case, model, STEPS, seed=1, order=range(4))
            assert handle.held_bytes() > 0
        block = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))

        def fail(*_):
            raise RuntimeError("in the middle")

        hook = block.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            sample(case, model, STEPS, seed=1, order=range(4, 5))
        hook.remove()
        assert handle.held_bytes() == 0
        assert torch.equal(sample(case, model, STEPS), fresh)


def test_held_bytes_equal_the_formula(made, name):
    """Tensors a feature times the outputs of the site, plus the gate's probe; none has a graph."""
    case, model = made
    if case.cls.startswith("UNet"):
        pytest.skip("a UNet's sites are counted in test_memory_of_a_unet")
    each, probes = TENSORS[name]
    features = site_bytes(case, model, make_method(name, **ON[name]))
    probe = probe_bytes(case, model, make_method(name, **ON[name]))
    with diffcache.wrapped(model, name, **ON[name]) as handle:
        sample(case, model, STEPS)
        assert handle.held_bytes() == each * features + probes * probe
        tensors = handle.denoisers[0].tensors(handle.run())
        assert all(t.grad_fn is None and not t.requires_grad for t in tensors)
        assert handle.last.peak_bytes == handle.held_bytes()
        diffcache.reset(model)
        assert handle.held_bytes() == 0


def site_bytes(case, model, method):
    """Bytes of one copy of the site's tensors, seen by hooks on an uncached forward."""
    parts = method.parts()
    sizes, hooks = {}, []
    lists = [model.get_submodule(e.key) for e in diffcache.inspect(model).lists]
    if parts.site == "model":
        wanted = [model]
    elif parts.site == "module":
        wanted = [m for n, m in model.named_modules() if is_module_site(n)]
    elif parts.feature == "output":
        wanted = [lists[-1][-1]]
    else:
        wanted = [blocks[-1] for blocks in lists]
    for module in wanted:
        hooks.append(
            module.register_forward_hook(lambda m, a, out: sizes.__setitem__(m, sum(t.nbytes for t in flat(out))))
        )
    with torch.no_grad():
        model(**case.kwargs(model, 0, step=0, steps=STEPS), return_dict=False)
    for hook in hooks:
        hook.remove()
    assert len(sizes) == len(wanted)
    return sum(sizes.values())


def is_module_site(name):
    last = name.rpartition(".")[2]
    if "single_transformer_blocks" in name:
        return last == "proj_out"
    return "blocks." in name and last in ("attn", "attn1", "attn2", "ff", "ffn", "ff_context")


def probe_bytes(case, model, method):
    """Bytes of the first block's image stream: the input of the second block; or of the sample."""
    if method.parts().when.probe == "sample":
        given = case.kwargs(model, 0, step=0, steps=STEPS)
        return given[diffcache.inspect(model).sample].nbytes
    shapes, first = [], next(iter(diffcache.inspect(model).lists)).key
    block = model.get_submodule(first)[0]

    def keep(module, args, kwargs):
        shapes.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    hook = block.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**case.kwargs(model, 0, step=0, steps=STEPS))
    hook.remove()
    return shapes[0].nbytes


def flat(out):
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if t is not None]


def test_memory_of_a_unet():
    """At `stack` a UNet keeps the last block's output alone, at `block` every output."""
    case = cases()["UNet2DConditionModel"]
    model = case.build()
    last, every = [], []
    blocks = [*model.down_blocks, model.mid_block, *model.up_blocks]
    hooks = [block.register_forward_hook(lambda m, a, out: every.append(all_bytes(out))) for block in blocks]
    hooks.append(model.up_blocks[-1].register_forward_hook(lambda m, a, out: last.append(all_bytes(out))))
    with torch.no_grad():
        model(**case.kwargs(model, 0, step=0, steps=STEPS))
    for hook in hooks:
        hook.remove()
    for site, expected in (("stack", sum(last)), ("block", sum(every))):
        with diffcache.wrapped(model, "interval", every=3, site=site) as handle:
            sample(case, model, STEPS)
            assert handle.held_bytes() == expected


def all_bytes(out):
    if isinstance(out, torch.Tensor):
        return out.nbytes
    return sum(all_bytes(part) for part in out)


def test_a_run_that_skips_nothing_says_so(made):
    case, model = made
    with diffcache.wrapped(model, "interval", every=1) as handle:
        sample(case, model, STEPS)
        with pytest.warns(diffcache.CacheWarning, match="skipped nothing in a run of 8 steps"):
            sample(case, model, STEPS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            diffcache.reset(model)
        assert handle.last.skipped == 0
