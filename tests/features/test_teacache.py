"""TeaCache: its gate, fit and probe, and its look into the first block."""

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import diffcache
from diffcache.attach.reuse.time_probe import TimeWatch
from diffcache.errors import AttachError, TablesError
from diffcache.features.combine import Combine
from diffcache.features.parts.accumulated import Accumulated, Rescaled
from diffcache.features.teacache import BY_TIME, TeaCache
from diffcache.offline.teacache_collect import fit
from tests.internals import computed_steps, reuse_in
from tests.test_presets import official_teacache
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes
from tests.zoo_runs import in_threads, sample

STEPS = 12


def probes(total):
    return [torch.tensor([2 + math.sin(0.4 * s), 1 + 0.05 * s]) for s in range(total)]


def test_limits_of_the_accumulating_gate():
    when = Accumulated(math.inf, Rescaled(), warmup=3, longest=2)
    assert computed_steps(when, 12, probes(12)) == [0, 1, 2, 5, 8, 11]


@pytest.mark.parametrize(("total", "first"), [(50, 5), (28, 3), (16, 2), (10, 1)])
def test_a_warmup_may_be_a_share_of_the_run(total, first):
    """The official script for HiDream computes steps below a tenth of their number."""
    when = TeaCache.published("hidream-i1-full", threshold=math.inf, model="").parts().when
    computed = computed_steps(when, total, [torch.ones(1, 2, 3)] * total)
    assert computed == [s for s in range(total) if s < total * 0.1] == list(range(first))


def test_a_polynomial_stops_at_the_ends_of_its_range():
    rescaled = Rescaled((2.0, 0.0, 1.0), 0.5, 2.0)
    assert [rescaled.error(x) for x in (0.0, 0.5, 1.0, 2.0, 9.0)] == [1.5, 1.5, 3.0, 9.0, 9.0]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_fit_finds_a_polynomial_again(scale):
    inputs = torch.linspace(0.1, 1.3, 30, dtype=torch.float64) * scale
    truth = torch.tensor([0.3, -1.0, 0.5, 2.0, 0.1], dtype=torch.float64)
    outputs = sum(c * (inputs / scale) ** (4 - i) for i, c in enumerate(truth))
    found = fit(inputs, outputs, 4) * scale ** torch.arange(4, -1, -1, dtype=torch.float64)
    assert torch.allclose(found, truth, rtol=1e-7)
    few = fit(inputs[:2], outputs[:2], 4)
    assert few[:3].abs().sum() == 0
    assert float(few[3] * inputs[1] + few[4]) == pytest.approx(float(outputs[1]))


MODELS = ["FluxTransformer2DModel", "WanTransformer3DModel", "SD3Transformer2DModel", "DiTTransformer2DModel"]


@pytest.fixture(scope="module", params=MODELS)
def made(request):
    case = cases()[request.param]
    return case, case.build()


def first_attention(model):
    """The first block's first attention, found here by its name."""
    blocks = next(m for m in model.children() if isinstance(m, torch.nn.ModuleList))
    block = blocks._modules["0"]
    return block, next(m for n, m in block.named_children() if n.startswith("attn"))


class Watched(Accumulated):
    """The gate, with notes of the probes it was given."""

    def should_compute(self, state, step, probe):
        NOTES.append((step.index, probe))
        return super().should_compute(state, step, probe)

    def computed(self, state, step, probe):
        NOTES.append((step.index, probe))
        super().computed(state, step, probe)


NOTES: list = []


def test_the_probe_is_what_the_first_attention_is_given(made):
    case, model = made
    _, attention = first_attention(model)
    given = []
    hook = attention.register_forward_pre_hook(
        lambda m, args, kwargs: given.append(kwargs.get("hidden_states", args[0] if args else None)), with_kwargs=True
    )
    sample(case, model, 5)
    hook.remove()
    NOTES.clear()
    with diffcache.wrapped(model, Combine(Watched(0.0))):
        sample(case, model, 5)
    assert [index for index, _ in NOTES if index] == [i for i in range(1, 5) for _ in (0, 1)]
    for index, probe in NOTES:
        assert torch.equal(probe, given[index])


def test_a_skipped_step_costs_the_norm_and_nothing_behind_it(made):
    case, model = made
    block, attention = first_attention(model)
    norm = next(m for n, m in block.named_children() if n.startswith("norm"))
    counts = {"norm": 0, "attention": 0, "linear": 0}
    linear = next(m for m in attention.modules() if isinstance(m, torch.nn.Linear))
    hooks = [
        module.register_forward_hook(lambda *_, name=name: counts.__setitem__(name, counts[name] + 1))
        for name, module in (("norm", norm), ("attention", attention), ("linear", linear))
    ]
    with diffcache.wrapped(model, TeaCache(math.inf, (1.0, 0.0))) as handle:
        sample(case, model, STEPS)
        assert [c.index for c in handle.last.calls if c.computed] == [0]
    for hook in hooks:
        hook.remove()
    assert counts["attention"] == 1  # of the first step
    assert counts["linear"] == 1
    # and once for every decision, and with another sample, to learn what changes with it
    assert counts["norm"] == 1 + STEPS + 1


WAN_1_3B = (2.39676752e03, -1.31110545e03, 2.01331979e02, -8.29855975e00, 1.37887774e-01)
SETTINGS = {"time": {"input": "time"}, "time-projection": {"input": "time-projection", "warmup": 5, "last": False}}

pytestmark = pytest.mark.usefixtures("quiet")


def embeddings(model, timesteps, which):
    """The time embedding of Wan at every step, or its projection, by the modules themselves."""
    parts = model.condition_embedder
    rows = []
    for timestep in timesteps:
        sinus = parts.timesteps_proj(timestep.reshape(1)).to(torch.float32)
        row = parts.time_embedder(sinus)
        rows.append(row if which == "time" else parts.time_proj(nn.functional.silu(row)))
    return rows


@pytest.mark.parametrize("which", ["time", "time-projection"])
@pytest.mark.parametrize("by_branch", [False, True])
def test_both_branches_of_a_pipeline_take_the_official_steps(which, by_branch, agrees):
    case, curve = pipes()["WanPipeline"], (0.2, 0.9, 0.05)
    pipe = case.build(0)
    counts = set()
    for threshold in (1.0, 3.0):
        method = TeaCache(threshold, curve, by_branch=by_branch, **SETTINGS[which])
        with diffcache.wrapped(pipe, method) as handle:
            case.run(pipe, steps=14)
            calls = handle.last.calls
        found = [[c.index for c in calls if c.computed and c.branch == name] for name in ("cond", "uncond")]
        rows = embeddings(pipe.transformer, pipe.scheduler.timesteps, which)
        steps = found, [official_teacache(rows, method)] * 2  # each call has sums of its own
        agrees("teacache", "official code (Wan2.1, HiDream), as a loop", steps=steps)
        counts.add(len(found[0]))
    assert len(counts) > 1


def noted(model, probe, calls):
    NOTES.clear()
    with diffcache.wrapped(model, Combine(Watched(0.0, of=probe))):
        for kwargs in calls:
            model(**kwargs)
    return [value for _, value in NOTES]


@pytest.mark.parametrize(
    ("name", "probe"),
    [(name, "time") for name in BY_TIME]
    + [
        ("WanTransformer3DModel", "time-projection"),
        ("FluxTransformer2DModel", "time"),
        ("SD3Transformer2DModel", "time"),
        ("UNet2DConditionModel", "time"),
        ("ChronoEditTransformer3DModel", "time-projection"),
    ],
)
def test_what_is_looked_at_depends_on_the_timestep_alone(name, probe):
    case = cases()[name]
    model = case.build()
    calls = [case.kwargs(model, seed, step=step, steps=4) for step in (0, 1) for seed in (0, 1)]
    taken = []
    block = model.get_submodule(case.blocks[0] + ".0")
    hook = block.register_forward_pre_hook(
        lambda m, args, kwargs: taken.append(kwargs.get("temb", args)), with_kwargs=True
    )
    # two calls at a timestep would be two branches of one decision
    one, other, later = [noted(model, probe, [calls[place]])[0] for place in (0, 1, 2)]
    hook.remove()
    assert torch.equal(one, other)
    assert one.shape == later.shape and not torch.equal(one, later)
    if name in ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"):
        assert torch.equal(taken[0] if torch.is_tensor(taken[0]) else taken[0][2], one)
    if probe == "time-projection":
        assert torch.equal(taken[0][2].flatten(1), one)


def test_parts_of_an_embedding_are_added():
    """CogVideoX with an offset embedding hands its blocks the sum of the two."""
    case = cases()["CogVideoXTransformer3DModel"]
    model = case.build()
    kwargs = case.kwargs(model, 0, step=0, steps=4)
    alone = noted(model, "time", [kwargs])[0]
    torch.manual_seed(0)
    model.ofs_embedding = nn.Linear(4, alone.shape[1])
    model.ofs_proj = lambda ofs: ofs.expand(4)[None]
    both = noted(model, "time", [{**kwargs, "ofs": torch.ones(1)}])[0]
    assert torch.allclose(both, alone + model.ofs_embedding(torch.ones(1, 4)))
    assert not any(m._forward_hooks for m in model.modules())


def test_a_published_polynomial_needs_its_input_named():
    for name in BY_TIME:
        model = cases()[name].build()
        with pytest.raises(AttachError, match=f"on {name}.*time embedding .input='time'"):
            diffcache.wrap(model, TeaCache(0.1, WAN_1_3B))
        for named in ("time", "modulated"):
            diffcache.unwrap(diffcache.wrap(model, TeaCache(0.1, WAN_1_3B, input=named)))
    diffcache.unwrap(diffcache.wrap(cases()["FluxTransformer2DModel"].build(), TeaCache(0.1, WAN_1_3B)))


def test_inputs_that_are_not_there_are_refused():
    flux = cases()["FluxTransformer2DModel"].build()
    before = {name: sorted(m.__dict__) for name, m in flux.named_modules()}
    with pytest.raises(AttachError, match=r"no time-projection embedding.*time_proj"):
        diffcache.wrap(flux, TeaCache(0.1, WAN_1_3B, input="time-projection"))
    assert {name: sorted(m.__dict__) for name, m in flux.named_modules()} == before


def test_an_embedding_that_is_made_twice_is_refused():
    """The later call may be of another time, such as that of clean tokens."""
    case = cases()["HiDreamImageTransformer2DModel"]
    model = case.build()
    clean = torch.zeros(2), torch.float32

    def embed(*_):
        model.t_embedder(*clean)

    model.x_embedder.register_forward_pre_hook(embed)
    with diffcache.wrapped(model, TeaCache(0.1, (1.0, 0.0), input="time")):
        model(**case.kwargs(model, 0, step=0, steps=4))
        with pytest.raises(AttachError, match="must be computed once in a call.*t_embedder 2 tim"):
            model(**case.kwargs(model, 0, step=1, steps=4))


def test_calibration_on_the_time_embedding(tmp_path):
    case = pipes()["WanPipeline"]
    pipe = case.build(0)
    file = tmp_path / "tables.safetensors"
    method = TeaCache(0.3, degree=1, input="time")
    made = diffcache.calibrate(pipe, method, [case.prompt(pipe, 0, 6)], steps=6, batch_size=1, out=file)
    rows = embeddings(pipe.transformer, pipe.scheduler.timesteps, "time")
    moved = [float((b - a).abs().sum() / a.abs().sum()) for a, b in pairwise(rows)]
    assert made.tables["points"][:, 0].tolist() == pytest.approx(moved, rel=1e-5)
    loaded = TeaCache(0.3, tables=str(file))
    assert loaded.parts().when.of == "time"
    with pytest.raises(TablesError, match="measured with input='time', not 'modulated'"):
        replace(loaded, input="modulated")
    with diffcache.wrapped(pipe, loaded) as handle:
        case.run(pipe, steps=6)
        assert handle.last.calls
    assert not any(isinstance(h, TimeWatch) for m in pipe.transformer.modules() for h in m._forward_hooks.values())


PEEK_STEPS = 6
TEA = TeaCache(0.5, (1.0, 0.0))


@pytest.fixture
def flux():
    case = cases()["FluxTransformer2DModel"]
    return case, case.build()


def hooks(model):
    return {n: len(m._forward_pre_hooks) for n, m in model.named_modules() if m._forward_pre_hooks}


def test_a_block_that_writes_to_its_input_is_refused(flux):
    case, model = flux
    forward = type(model.transformer_blocks[0]).forward

    class Greedy(type(model.transformer_blocks[0])):
        def forward(self, hidden_states, *args, **kwargs):
            hidden_states.add_(0.125)
            return forward(self, hidden_states, *args, **kwargs)

    model.transformer_blocks[0].__class__ = Greedy
    with diffcache.wrapped(model, TEA), pytest.raises(AttachError, match="writes to its input before its attention"):
        sample(case, model, PEEK_STEPS)


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
        sample(case, model, PEEK_STEPS)
        model.transformer_blocks[0] = copy.deepcopy(model.transformer_blocks[1])
        found = sample(case, model, PEEK_STEPS)
    with diffcache.wrapped(model, TEA):
        assert torch.equal(sample(case, model, PEEK_STEPS), found)
    assert hooks(model) == {}


def test_a_peek_in_one_thread_cuts_no_call_of_another(flux):
    case, model = flux
    with diffcache.wrapped(model, TEA):
        alone = [sample(case, model, PEEK_STEPS, seed=seed) for seed in (0, 1)]

        def work(seed):
            return [sample(case, model, PEEK_STEPS, seed=seed) for _ in range(2)]

        found = in_threads(*(partial(work, seed) for seed in (0, 1)))
    for seed in (0, 1):
        assert all(torch.equal(one, alone[seed]) for one in found[seed])


def test_a_hooked_forward_that_moves_weights_is_run_in_a_peek(flux):
    """As with accelerate's hooks: the weights are only there inside of the block's forward."""
    case, model = flux
    with diffcache.wrapped(model, TEA):
        expected = sample(case, model, PEEK_STEPS)
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
        assert torch.equal(sample(case, model, PEEK_STEPS), expected)
        computed = diffcache.report(model).steps_computed
    assert len(moves) >= PEEK_STEPS - 1 + computed
