"""Looking into the first block: what it refuses, compiled blocks, offloading, threads, copies."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch

import diffcache
from diffcache.attach.reuse.modulated_probe import watch
from diffcache.errors import AttachError
from diffcache.features.teacache import TeaCache
from tests.internals import reuse_in
from tests.zoo.catalog import cases
from tests.zoo_runs import in_threads, sample

STEPS = 6
TEA = TeaCache(0.5, (1.0, 0.0))

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def flux():
    case = cases()["FluxTransformer2DModel"]
    return case, case.build()


def hooks(model):
    return {n: len(m._forward_pre_hooks) for n, m in model.named_modules() if m._forward_pre_hooks}


@pytest.mark.parametrize("name", ["UNet1DModel", "UNet2DModel"])
def test_models_without_attention_in_the_first_block_are_refused_at_wrap(name):
    model = cases()[name].build()
    before = hooks(model)
    message = "down_blocks.0 has no attention module.*with lead=1, as FirstBlock"
    with pytest.raises(AttachError, match=message):
        diffcache.wrap(model, TEA)
    assert hooks(model) == before


def test_a_block_that_writes_to_its_input_is_refused(flux):
    case, model = flux
    forward = type(model.transformer_blocks[0]).forward

    class Greedy(type(model.transformer_blocks[0])):
        def forward(self, hidden_states, *args, **kwargs):
            hidden_states.add_(0.125)
            return forward(self, hidden_states, *args, **kwargs)

    model.transformer_blocks[0].__class__ = Greedy
    with diffcache.wrapped(model, TEA), pytest.raises(AttachError, match="writes to its input before its attention"):
        sample(case, model, STEPS)


def test_a_first_block_that_is_not_looked_into_is_refused(flux):
    """The list is run from its second block: the first one's attention is never come to."""
    case, model = flux
    with diffcache.wrapped(model, TEA) as handle:
        sample(case, model, 2)
        block = model.transformer_blocks[1]
        peek = reuse_in(handle).setup.peek
        ran = []
        hook = block.register_forward_hook(lambda *_: ran.append(1))
        with pytest.raises(AttachError, match=r"calls none of .*\(transformer_blocks.0.attn"):
            peek.look(lambda: ran.append(0), (), {})
        hook.remove()
        assert ran == [0]


def test_replaced_blocks_are_looked_into(flux):
    case, model = flux
    with diffcache.wrapped(model, TEA):
        sample(case, model, STEPS)
        model.transformer_blocks[0] = copy.deepcopy(model.transformer_blocks[1])
        found = sample(case, model, STEPS)
    with diffcache.wrapped(model, TEA):
        assert torch.equal(sample(case, model, STEPS), found)
    assert hooks(model) == {}


def test_compiled_blocks_give_the_same():
    case = cases()["WanTransformer3DModel"]
    model = case.build()
    with diffcache.wrapped(model, TEA) as handle:
        plain = sample(case, model, STEPS)
        marks = [call.computed for call in handle.last.calls]
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    sample(case, model, 2)
    uncached = len(graphs)
    torch._dynamo.reset()
    with diffcache.wrapped(model, TEA) as handle:
        assert torch.equal(sample(case, model, STEPS), plain)
        assert [call.computed for call in handle.last.calls] == marks
        assert 0 < sum(marks) < STEPS
    torch._dynamo.reset()
    assert len(graphs) == 2 * uncached


def test_inference_mode_and_copies(flux):
    case, model = flux
    with diffcache.wrapped(model, TEA):
        plain = sample(case, model, STEPS)
        assert 0 < diffcache.report(model).steps_skipped < STEPS
        with torch.inference_mode():
            assert torch.equal(sample(case, model, STEPS), plain)
        twin = copy.deepcopy(model)
        uncached = sample(case, twin, STEPS)
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(sample(case, again, STEPS), uncached)
        assert torch.equal(sample(case, model, STEPS), plain)
    assert torch.equal(sample(case, model, STEPS), uncached)
    assert watch(model, (), {}) is None


def test_a_peek_in_one_thread_cuts_no_call_of_another(flux):
    case, model = flux
    with diffcache.wrapped(model, TEA):
        alone = [sample(case, model, STEPS, seed=seed) for seed in (0, 1)]

        def work(seed):
            return [sample(case, model, STEPS, seed=seed) for _ in range(2)]

        found = in_threads(*(partial(work, seed) for seed in (0, 1)))
    for seed in (0, 1):
        assert all(torch.equal(one, alone[seed]) for one in found[seed])


def test_a_hooked_forward_that_moves_weights_is_run_in_a_peek(flux):
    """As with accelerate's hooks: the weights are only there inside of the block's forward."""
    case, model = flux
    with diffcache.wrapped(model, TEA):
        expected = sample(case, model, STEPS)
    block = model.transformer_blocks[0]
    weights = {name: p.data for name, p in block.named_parameters()}
    forward, moves = block.forward, []

    def moved(*args, **kwargs):
        for name, parameter in block.named_parameters():
            parameter.data = weights[name]
        moves.append(1)
        try:
            return forward(*args, **kwargs)
        finally:
            for parameter in block.parameters():
                parameter.data = parameter.data.new_full((1,), math.nan)

    block.forward = moved
    with diffcache.wrapped(model, TEA):
        assert torch.equal(sample(case, model, STEPS), expected)
        computed = diffcache.report(model).steps_computed
    assert len(moves) >= STEPS - 1 + computed
