"""SpeCa: its steps, against the counters of the official code for FLUX written as a loop."""

import math

import pytest
import torch
from torch import nn

import diffcache
from diffcache.features.speca import SpeCa, Verified

STEPS = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden_states, temb):
        return hidden_states + 0.3 * torch.tanh(self.inner(hidden_states) + temb)


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(16, 16)

    def forward(self, hidden_states, timestep):
        temb = torch.sin(timestep * torch.arange(1, 17) / 6)
        for block in self.blocks:
            hidden_states = block(hidden_states, temb)
        return self.head(hidden_states)


def forecast(factors, distance):
    return sum(g * distance**i / math.factorial(i) for i, g in enumerate(factors))


def differences(old, value, distance, order):
    found = [value]
    for one in old[:order]:
        found.append((found[-1] - one) / distance)
    return found


def official(model, samples, times, threshold, decay, floor, shortest, longest, order, warmup):
    """Run the loop of the official code: its counters, and which error it looks at when."""
    last_type, counter, check, error, anchor = "none", 0, False, 0.0, 0
    features, outputs, computed, drawn = [], [], [], []
    for step, (sample, time) in enumerate(zip(samples, times, strict=True)):
        if last_type == "full":
            kind, counter, check, error = "taylor", 1, False, None
        else:
            limit = max(threshold * decay ** (step / len(samples)), floor)
            check = counter >= shortest
            large = error is not None and error > limit
            if step < warmup or counter >= longest or (large and check):
                kind, counter = "full", 0
            else:
                kind, counter = "taylor", counter + 1
        last_type = kind
        temb = torch.sin(time * torch.arange(1, 17) / 6)
        if kind == "full":
            hidden = sample
            for block in model.blocks[:-1]:
                hidden = block(hidden, temb)
            out = model.head(model.blocks[-1](hidden, temb))
            taken = order if step >= warmup - 1 and step > anchor else 0
            features = differences(features, hidden - sample, step - anchor, taken)
            outputs = differences(outputs, out, step - anchor, taken)
            anchor = step
            computed.append(step)
        else:
            hidden = sample + forecast(features, step - anchor)
            out = model.head(model.blocks[-1](hidden, temb))
            if check:
                guess = forecast(outputs, step - anchor)
                error = ((guess - out).abs().mean() / out.abs().mean()).item()
        drawn.append(out)
    return computed, drawn


@pytest.mark.parametrize("threshold", [0.02, 0.08, 0.3])
@pytest.mark.parametrize(("shortest", "longest", "warmup"), [(2, 8, 3), (1, 4, 1), (3, 6, 6)])
def test_official_steps_one_by_one(threshold, shortest, longest, warmup, agrees):
    torch.manual_seed(0)
    model = Toy().eval()
    first, second = torch.randn(2, 1, 20, 16)
    shares = [(step / STEPS) ** 2 for step in range(STEPS)]
    samples = [(1 - share) * first + share * second for share in shares]
    times = [torch.tensor([1 - step / STEPS]) for step in range(STEPS)]
    settings = dict(
        threshold=threshold, decay=0.3, floor=0.01, shortest=shortest, longest=longest, order=2, warmup=warmup
    )
    with torch.no_grad():
        computed, drawn = official(model, samples, times, **settings)
        with diffcache.wrapped(model, SpeCa(**settings)) as handle:
            with diffcache.run(model, steps=STEPS):
                found = [model(x, timestep=t) for x, t in zip(samples, times, strict=True)]
            steps = [call.index for call in handle.last.calls if call.computed], computed
    agrees("speca", "counters of the official code, as a loop", found, drawn, 1e-5, steps)
    assert 3 <= len(computed) < STEPS / 2 + 1


def test_a_longer_run_of_skipped_steps_than_shortest_is_checked():
    rule = Verified(0.1, shortest=1, decay=1, warmup=1)
    state = rule.init()
    assert rule._limit(diffcache.Step(3)) == pytest.approx(0.1)
    one, zero = torch.ones(4), torch.zeros(4)
    assert rule.should_compute(state, diffcache.Step(0), None)
    rule.computed(state, diffcache.Step(0), None)
    rule.returned(state, diffcache.Step(0), one)
    for index, output, then in ((1, one, False), (2, zero, False), (3, None, True)):
        step = diffcache.Step(index)
        assert rule.should_compute(state, step, None) is then
        assert rule.should_compute(state, step, None) is then  # asked twice in a step
        if output is not None:
            rule.verified(state, step, output)
