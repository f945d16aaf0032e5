"""TaylorSeer and confidence gating against loops written here from their cards, bit for bit."""

import contextlib
import math
import warnings

import pytest
import torch

import diffcache
from diffcache import ConfidenceGatedTaylor, Interval, TaylorSeer
from tests.zoo.pipes import pipes

STEPS = 9


@pytest.fixture(scope="module", params=["FluxPipeline", "DiTPipeline"])
def made(request):
    case = pipes()[request.param]
    pipe = case.build(0)
    return case, pipe, case.run(pipe, 0, STEPS)


class Factors:
    """Card 1: factors of one tensor, divided by the distance of the last two full steps."""

    def __init__(self, order):
        self.order, self.factors, self.anchor = order, [], None

    def update(self, step, value, guard):
        fresh = [value]
        for old in self.factors[: self.order] if guard else []:
            fresh.append((fresh[-1] - old) / (step - self.anchor))
        self.factors, self.anchor = fresh, step

    def predict(self, step):
        total, k = self.factors[0], step - self.anchor
        for i, factor in enumerate(self.factors[1:], start=1):
            total = torch.add(total, factor, alpha=k**i / math.factorial(i))
        return total


@contextlib.contextmanager
def replaced_forwards(modules, make):
    """Replace the forward of every module by `make(name, original)` for a while."""
    originals = {name: module.forward for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = make(name, originals[name])
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


class Clock:
    """Counts the denoiser's calls: one a step in both pipelines."""

    def __init__(self, model):
        self.step = -1
        self.hook = model.register_forward_pre_hook(self.tick)

    def tick(self, module, args):
        self.step += 1


def modules_of_the_paper(model):
    """Attention and feed-forward of every block; of FLUX single blocks the fused projection."""
    found = {}
    for name, module in model.named_modules():
        if "single_transformer_blocks" in name:
            if name.endswith(".proj_out"):
                found[name] = module
        elif name.rpartition(".")[2] in ("attn", "attn1", "ff", "ff_context"):
            found[name] = module
    return found


def reference_taylorseer(case, pipe, every, order, warmup):
    model = pipe.transformer
    clock, full_steps, states, counter = Clock(model), [], {}, {"c": 0, "step": -1, "full": True}

    def is_full(step):
        if step != counter["step"]:
            counter["step"] = step
            counter["full"] = step < warmup or counter["c"] == every - 1
            counter["c"] = 0 if counter["full"] else counter["c"] + 1
            full_steps.extend([step] if counter["full"] else [])
        return counter["full"]

    def make(name, original):
        def forward(*args, **kwargs):
            step = clock.step
            if is_full(step):
                out = original(*args, **kwargs)
                parts = out if isinstance(out, tuple) else (out,)
                for i, part in enumerate(parts):
                    factors = states.setdefault((name, i), Factors(order))
                    factors.update(step, part.clone(), guard=step > warmup - 2)
                return out
            count = sum(key[0] == name for key in states)
            guesses = tuple(states[name, i].predict(step).clone() for i in range(count))
            return guesses if count > 1 else guesses[0]

        return forward

    with replaced_forwards(modules_of_the_paper(model), make):
        out = case.run(pipe, 0, STEPS)
    clock.hook.remove()
    return out, full_steps


def cached(case, pipe, method):
    with diffcache.wrapped(pipe, method) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore", diffcache.CacheWarning)
        out = case.run(pipe, 0, STEPS)
        return out, [call.index for call in handle.last.calls if call.computed]


@pytest.mark.parametrize(("every", "order", "warmup"), [(3, 0, 1), (3, 1, 1), (4, 1, 3), (3, 2, 2), (2, 2, 3)])
def test_taylorseer_equals_an_independent_loop(made, every, order, warmup, agrees):
    case, pipe, stock = made
    expected, steps = reference_taylorseer(case, pipe, every, order, warmup)
    method = TaylorSeer(every=every, order=order, warmup=warmup, site="module")
    out, computed = cached(case, pipe, method)
    agrees("taylorseer", "official code, as a loop", [out], [expected], 0.0, (computed, steps))
    if (order, warmup) == (0, 1):
        out, computed = cached(case, pipe, Interval(every, site="module"))
        agrees("interval", "paper (FORA), as a loop", [out], [expected], 0.0, (computed, steps))
    assert not torch.equal(out, stock)


def reference_gated(case, pipe, threshold, order, probe_order, warmup, start):  # noqa: C901
    """Card 2: list A on the first block's image stream, list B on the last block's output."""
    model = pipe.transformer
    blocks = [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", [])]
    clock, full_steps = Clock(model), []
    probe, outputs, now = Factors(probe_order), {}, {"skip": False}

    def image(out):
        return out[1] if isinstance(out, tuple) else out

    def streams(args, kwargs, out_is_pair):
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return (kwargs["encoder_hidden_states"], hidden) if out_is_pair else hidden

    pair = hasattr(model, "single_transformer_blocks")

    def make(name, original):
        def forward(*args, **kwargs):
            step = clock.step
            if name == 0:
                out = original(*args, **kwargs)
                u, skip = image(out), False
                if step >= warmup:
                    guess = probe.predict(step)
                    error = (guess - u).abs().mean() / u.abs().mean()
                    skip = error.item() < threshold
                if step in (0, STEPS - 1):
                    skip = False
                if not skip:
                    probe.update(step, u.clone(), guard=step >= start)
                    full_steps.append(step)
                now["skip"] = skip
                return out
            if not now["skip"]:
                out = original(*args, **kwargs)
                if name == len(blocks) - 1:
                    for i, part in enumerate(out if pair else (out,)):
                        factors = outputs.setdefault(i, Factors(order))
                        factors.update(step, part.clone(), guard=step >= start)
                return out
            if name < len(blocks) - 1:
                return streams(args, kwargs, pair)
            guesses = tuple(outputs[i].predict(step) for i in sorted(outputs))
            return guesses if pair else guesses[0]

        return forward

    with replaced_forwards(dict(enumerate(blocks)), make):
        out = case.run(pipe, 0, STEPS)
    clock.hook.remove()
    return out, full_steps


@pytest.mark.parametrize(
    ("threshold", "order", "probe_order", "warmup", "start"),
    [(0.05, 1, 1, 3, 1), (0.2, 1, 2, 3, 0), (0.5, 2, 3, 4, 2), (0.5, 0, 1, 5, 2), (1e9, 1, 1, 3, 2)],
)
def test_confidence_gating_equals_an_independent_loop(made, threshold, order, probe_order, warmup, start, agrees):
    case, pipe, _ = made
    settings = (threshold, order, probe_order, warmup, start)
    expected, steps = reference_gated(case, pipe, *settings)
    out, computed = cached(case, pipe, ConfidenceGatedTaylor(*settings))
    source = "paper, as a loop"
    agrees("confidence-gated-taylor", source, [out], [expected], 0.0, (computed, steps))
    if threshold == 1e9:
        assert steps == [*range(warmup), STEPS - 1]
