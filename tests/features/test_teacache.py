"""TeaCache: the gate against a loop of its own, the fit in closed form, the peek at the input."""

import math

import pytest
import torch

import diffcache
from diffcache.features.collect import RunInfo
from diffcache.features.combine import Combine
from diffcache.features.parts.accumulated import Accumulated, Rescaled
from diffcache.features.tables import Tables
from diffcache.features.teacache import TeaCache
from diffcache.offline.teacache_collect import Changes, fit
from diffcache.step import Step
from tests.internals import computed_steps
from tests.zoo.catalog import cases
from tests.zoo_runs import sample

STEPS = 12
CURVE = (3.0, -0.5, 1.1, 0.01)


def probes(total):
    return [torch.tensor([2 + math.sin(0.4 * s), 1 + 0.05 * s]) for s in range(total)]


# the gate and the fit, without a network -------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.7, math.inf])
@pytest.mark.parametrize("coefficients", [(1.0, 0.0), CURVE])
def test_the_schedule_follows_an_independent_trace(threshold, coefficients):
    steps, total, values = [], 0.0, probes(40)
    for index, probe in enumerate(values):
        if index:
            last = values[index - 1]
            x = float((probe - last).abs().mean() / last.abs().mean())
            total += sum(c * x ** (len(coefficients) - 1 - i) for i, c in enumerate(coefficients))
        if index in (0, 39) or total >= threshold:
            steps.append(index)
            total = 0.0
    assert computed_steps(TeaCache(threshold, coefficients), 40, probes(40)) == steps
    assert len(steps) < 40


def test_limits_of_the_accumulating_gate():
    when = Accumulated(math.inf, Rescaled(), warmup=3, longest=2)
    assert computed_steps(when, 12, probes(12)) == [0, 1, 2, 5, 8, 11]


@pytest.mark.parametrize(("total", "first"), [(50, 5), (28, 3), (16, 2), (10, 1)])
def test_a_warmup_may_be_a_share_of_the_run(total, first):
    """The official script for HiDream computes steps below a tenth of their number."""
    when = TeaCache.published("hidream-i1-full", threshold=math.inf, model="").parts().when
    computed = computed_steps(when, total, [torch.ones(1, 2, 3)] * total)
    assert computed == [s for s in range(total) if s < total * 0.1] == list(range(first))
    state = when.init()
    when.computed(state, Step(0, total=total), torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match=r"warmup=0.1: a share of a run whose length nobody said"):
        when.should_compute(state, Step(3), torch.ones(1, 2, 3))


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


def collected(runs, streams=2):
    collector = Changes(2)
    for prompt, run in enumerate(runs):
        collector.begin(RunInfo(0, prompt, torch.zeros(len(run)), None, len(run)))
        for index, (probe, output) in enumerate(run):
            step = Step(index, total=len(run))
            collector.probe(step, torch.full((1, 2, 3), probe))
            for stream in range(streams):
                for _ in range(2 if index == 0 else 1):  # a first call may be recorded again
                    collector.feature(step, "blocks.7", stream, torch.full((1, 4), output))
                other = Step(index, total=len(run), branch=1)
                collector.feature(other, "blocks.7", stream, torch.full((1, 4), 9.0))
        collector.end()
    return collector


def test_calibration_pairs_changes_of_neighboring_steps():
    collector = collected([[(1.0, 2.0), (1.5, 3.0), (3.0, 3.3)], [(2.0, 1.0), (2.2, 1.8)]])
    expected = [(0.5, 0.5), (1.0, 0.1), (0.1, 0.8)]
    assert collector.points.tolist() == [pytest.approx(pair, rel=1e-5) for pair in expected]
    tables = collector.tables()
    assert tables["range"].tolist() == pytest.approx([0.1, 1.0], rel=1e-5)
    curve = Rescaled(tuple(tables["coefficients"].tolist()))
    assert [curve.error(x) for x, _ in expected] == pytest.approx([y for _, y in expected], 1e-4)
    header = {"method": "teacache", "steps": 3, **collector.settings()}
    parts = TeaCache(0.3, tables=Tables(header, tables)).parts()
    assert parts.when.indicator.error(1.0) == pytest.approx(0.1, rel=1e-4)


# on models ------------------------------------------------------------------------------------

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
