"""EasyCache: its gate and its stand-in against loops written from the official codes."""

import pytest
import torch

import diffcache
from diffcache.features.easycache import EasyCache
from tests.zoo.catalog import cases

STEPS = 16


@pytest.fixture(scope="module")
def made():
    case = cases()["FluxTransformer2DModel"]
    return case, case.build()


def euler(case, model, call):
    """Sample with Euler's method along times that are not even; return the outputs of all steps."""
    x = case.kwargs(model, 0, step=0, steps=STEPS)["hidden_states"]
    times = [(1 - s / STEPS) ** 1.5 for s in range(STEPS + 1)]
    outs = []
    with torch.no_grad():
        for step in range(STEPS):
            given = case.kwargs(model, 0, step=step, steps=STEPS)
            out = call({**given, "hidden_states": x}, step)
            outs.append(out.clone())
            x = x + (times[step + 1] - times[step]) * out
    return torch.stack(outs)


class Loop:
    """EasyCache as the official script for HunyuanVideo has it, and as ComfyUI does.

    Both keep the input at every computed step; the official code measures the change of the input
    from the step before, ComfyUI from the last computed step.
    """

    def __init__(self, model, threshold, warmup, since):
        self.model, self.threshold, self.warmup, self.since = model, threshold, warmup, since
        self.k = self.out = self.before = self.anchor = None
        self.total, self.computed = 0.0, []

    def __call__(self, given, step):
        x = given["hidden_states"]
        compute = step < self.warmup or step == STEPS - 1 or self.k is None
        if not compute:
            change = (x - (self.before if self.since == "step" else self.anchor)).abs().mean()
            self.total += float(self.k * change / self.out.abs().mean())
            compute = self.total >= self.threshold
        self.before = x
        if not compute:
            return x + self.diff
        out = self.model(**given, return_dict=False)[0]
        if self.out is not None:
            self.k = (out - self.out).abs().mean() / (x - self.anchor).abs().mean()
        self.total, self.out, self.anchor, self.diff = 0.0, out, x, out - x
        self.computed.append(step)
        return out


@pytest.mark.parametrize("since", ["step", "computed"])
@pytest.mark.parametrize(("threshold", "warmup"), [(0.2, 3), (0.4, 1), (0.8, 4)])
def test_official_easycache_step_by_step(made, threshold, warmup, since, agrees):
    case, model = made
    loop = Loop(model, threshold, warmup, since)
    expected = euler(case, model, loop)
    with diffcache.wrapped(model, EasyCache(threshold, warmup, since)) as handle:
        with diffcache.run(model, steps=STEPS):
            call = lambda given, step: model(**given, return_dict=False)[0]  # noqa: E731
            found = euler(case, model, call)
        computed = [call.index for call in handle.last.calls if call.computed]
    source = {"step": "official code, as a loop", "computed": "ComfyUI's code, as a loop"}[since]
    agrees("easycache", source, [found], [expected], 2e-6, (computed, loop.computed))
    assert warmup < len(computed) < STEPS


def test_another_size_of_sample_is_computed():
    when = EasyCache(1e9, warmup=1).parts().when
    state = when.init()
    for index in range(3):
        step, sample = diffcache.Step(index), torch.full((2, 4), 1.0 + index)
        assert when.should_compute(state, step, sample) == (index < 2)
        if index < 2:
            when.computed(state, step, sample)
            when.returned(state, step, sample**2)
    assert state.rate == 3.0  # (2² - 1²) / (2 - 1)
    assert when.should_compute(state, diffcache.Step(3), torch.ones(3, 4))
    with pytest.raises(ValueError, match="measured on the sample"):
        when.should_compute(state, diffcache.Step(4), None)
