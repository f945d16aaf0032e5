"""Per-site errors against hooks on an uncached run and closed forms, and the run they foretell."""

import math
import warnings

import pytest
import torch
from torch import nn

import diffcache
from diffcache import Combine, ConfidenceGatedTaylor, FirstBlock, Gate, Interval, TaylorSeer
from diffcache.errors import AttachError, DiffcacheError
from diffcache.eval.oracle import observe
from diffcache.features.parts.instead import Newton, Reuse, Taylor
from diffcache.features.parts.when import Every, Listed
from tests.shipped import CALL, load
from tests.zoo.pipes import pipes

STEPS = 9
PROMPTS = ["a fox left of an owl on grass"]


@pytest.fixture(scope="module")
def pipe():
    return load()


def draw(pipe, prompts=PROMPTS, steps=STEPS):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return pipe(
            prompts, num_inference_steps=steps, generator=generator, output_type="pt", **CALL
        ).images


def skipped_steps(errors):
    """Steps at which any site has an error."""
    return [s for s in errors.steps if any(row[s] is not None for row in errors.values)]


class Streams:
    """Records, on an uncached run, what goes into and comes out of every block."""

    def __init__(self, model):
        self.into, self.out, self.hooks = {}, {}, []
        for key in ("transformer_blocks", "single_transformer_blocks"):
            for index, block in enumerate(getattr(model, key)):
                name = f"{key}.{index}"
                self.into[name], self.out[name] = [], []
                self.hooks += [
                    block.register_forward_pre_hook(self.before(name), with_kwargs=True),
                    block.register_forward_hook(self.after(name)),
                ]

    def before(self, name):
        def hook(module, args, kwargs):
            given = (kwargs["encoder_hidden_states"], kwargs["hidden_states"])
            self.into[name].append([value.clone() for value in given])

        return hook

    def after(self, name):
        return lambda module, args, out: self.out[name].append([value.clone() for value in out])

    def close(self):
        for hook in self.hooks:
            hook.remove()

    def residuals(self, first, last):
        """Per step, the residuals of both streams from the input of one block to another's output."""
        pairs = zip(self.into[first], self.out[last], strict=True)
        return [[o - i for i, o in zip(into, out, strict=True)] for into, out in pairs]


@pytest.fixture(scope="module")
def uncached(pipe):
    streams = Streams(pipe.transformer)
    pictures = draw(pipe)
    streams.close()
    return streams, pictures


def reuse_error(residuals, step, computed):
    """The error of the residuals of the last computed step, norms over both streams."""
    last = max(c for c in computed if c <= step)
    difference = sum(
        float((a - b).abs().double().sum())
        for a, b in zip(residuals[last], residuals[step], strict=True)
    )
    return difference / sum(float(value.abs().double().sum()) for value in residuals[step])


def check_row(row, residuals, computed):
    for step, value in enumerate(row):
        if step in computed:
            assert value is None
        else:
            assert value == pytest.approx(reuse_error(residuals, step, computed), rel=1e-4)


def test_errors_at_blocks_equal_those_of_hooks_on_an_uncached_run(pipe, uncached):
    streams, pictures = uncached
    drawn = []
    method = Combine(Every(3), Reuse(), "block")
    errors = observe(pipe, method, lambda: drawn.append(draw(pipe)))
    assert torch.equal(drawn[0], pictures)
    assert errors.steps == list(range(STEPS))
    assert errors.sites == list(streams.into)  # all blocks, in the order they run in
    for site, row in zip(errors.sites, errors.values, strict=True):
        check_row(row, streams.residuals(site, site), {0, 3, 6})


def test_errors_of_the_stack_are_those_of_both_lists(pipe, uncached):
    streams, pictures = uncached
    drawn = []
    errors = observe(pipe, Interval(every=4), lambda: drawn.append(draw(pipe)))
    assert torch.equal(drawn[0], pictures)
    assert errors.sites == ["transformer_blocks", "single_transformer_blocks"]
    for site, row in zip(errors.sites, errors.values, strict=True):
        first, *_, last = (name for name in streams.into if name.startswith(f"{site}."))
        check_row(row, streams.residuals(first, last), {0, 4, 8})


def test_errors_of_a_forecast_follow_the_open_loop(pipe, uncached):
    streams, _ = uncached
    method = Combine(Listed([0, 2, 5]), Taylor(1), "run", blocks="single_transformer_blocks.2-4")
    errors = observe(pipe, method, lambda: draw(pipe))
    assert errors.sites == ["single_transformer_blocks.4"]
    residuals = streams.residuals("single_transformer_blocks.2", "single_transformer_blocks.4")
    guesses = {1: (0, 0, 1), 3: (2, 0, 1), 4: (2, 0, 2), 6: (5, 2, 1), 7: (5, 2, 2), 8: (5, 2, 3)}
    for step, value in enumerate(errors.values[0]):
        if step not in guesses:
            assert value is None
            continue
        last, before, ahead = guesses[step]
        wrong = size = 0.0
        for number in range(2):
            new, old = residuals[last][number], residuals[before][number]
            slope = (new - old) / (last - before) if last != before else torch.zeros_like(new)
            true = residuals[step][number]
            wrong += float((new + ahead * slope - true).abs().double().sum())
            size += float(true.abs().double().sum())
        assert value == pytest.approx(wrong / size, rel=1e-3)


def test_a_method_that_skips_nothing_has_no_errors(pipe):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning that nothing was skipped
        errors = observe(pipe, Interval(every=1), lambda: draw(pipe))
    assert len(errors.values) == len(errors.sites) == 2
    assert all(value is None for row in errors.values for value in row)


@pytest.mark.parametrize(
    "method",
    [TaylorSeer(every=3, warmup=2), TaylorSeer(every=4, order=2, site="model"),
     ConfidenceGatedTaylor(threshold=math.inf, warmup=3)],
    ids=["module", "model", "gate"],
)  # fmt: skip
def test_the_same_steps_as_in_a_real_run(pipe, uncached, method):
    drawn = []
    errors = observe(pipe, method, lambda: drawn.append(draw(pipe)))
    assert torch.equal(drawn[0], uncached[1])
    with diffcache.api.wrapped(pipe, method):
        draw(pipe)
        calls = diffcache.report(pipe).calls
        paths = {name for name, _ in pipe.transformer.named_modules()}
    assert skipped_steps(errors) == [call.index for call in calls if not call.computed]
    named = [site for site in errors.sites if site in paths]
    assert named == errors.sites or errors.sites == ["output"]
    values = [v for row in errors.values for v in row if v is not None]
    assert values and all(math.isfinite(v) and 0 < v < 2 for v in values)


def test_module_sites_are_named_by_their_paths(pipe):
    errors = observe(
        pipe, TaylorSeer(every=2, warmup=1, site="module"), lambda: draw(pipe, steps=3)
    )
    assert errors.sites[:3] == [
        "transformer_blocks.0.attn", "transformer_blocks.0.ff", "transformer_blocks.0.ff_context",
    ]  # fmt: skip
    assert errors.sites[-1] == "single_transformer_blocks.6.proj_out"
    assert errors.to_dict()["values"] == errors.values


def test_a_gate_learns_its_probe_from_computed_steps_only(pipe):
    """The first block's residual drifts from the last step that a real run computes."""
    probes = []
    block = pipe.transformer.transformer_blocks[0]

    def hook(module, args, kwargs, out):
        probes.append(out[1].float() - kwargs["hidden_states"].float())

    handle = block.register_forward_hook(hook, with_kwargs=True)
    try:
        draw(pipe)
    finally:
        handle.remove()

    def drift(a, b):
        return float((probes[a] - probes[b]).abs().mean() / probes[a].abs().mean())

    drifts = sorted(drift(s, s + 1) for s in range(STEPS - 1))
    threshold = 1.5 * drifts[STEPS // 2]
    computed = [0]
    for step in range(1, STEPS):
        if drift(computed[-1], step) >= threshold:
            computed.append(step)
    expected = [step for step in range(STEPS) if step not in computed]
    assert 1 < len(expected) < STEPS - 1  # the threshold cuts through the drifts
    errors = observe(pipe, FirstBlock(threshold=threshold), lambda: draw(pipe))
    assert skipped_steps(errors) == expected


def test_the_pipe_is_as_before_after_an_exception(pipe, uncached):
    modules = {name: dict(m.__dict__) for name, m in pipe.transformer.named_modules()}
    kinds = {name: type(m) for name, m in pipe.transformer.named_modules()}
    scheduler, kind = type(pipe.scheduler), type(pipe)

    def broken():
        draw(pipe, steps=3)
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        observe(pipe, Interval(every=2), broken)
    assert kinds == {name: type(m) for name, m in pipe.transformer.named_modules()}
    for name, module in pipe.transformer.named_modules():
        assert module.__dict__.keys() == modules[name].keys()
    assert not pipe.transformer._forward_hooks and not pipe.transformer._forward_pre_hooks
    assert type(pipe.scheduler) is scheduler and type(pipe) is kind
    assert torch.equal(draw(pipe), uncached[1])


def test_errors_say_what_to_do(pipe):
    with pytest.raises(DiffcacheError, match="ran no denoiser of this FluxPipeline"):
        observe(pipe, Interval(every=2), lambda: None)
    diffcache.wrap(pipe, Interval(every=2))
    try:
        with pytest.raises(AttachError, match="unwrap it first"):
            observe(pipe, "interval", lambda: draw(pipe))
    finally:
        diffcache.unwrap(pipe)
    with pytest.raises(LookupError, match="unknown method 'intervl'; did you mean 'interval'"):
        observe(pipe, "intervl", lambda: draw(pipe))


@pytest.mark.parametrize("name", ["WanPipeline", "DiTPipeline", "StableDiffusionPipeline"])
def test_guidance_in_two_calls_in_one_batch_and_a_unet(name):
    case = pipes()[name]
    other = case.build(0)
    expected, drawn = case.run(other), []
    errors = observe(
        other, Combine(Every(2), Reuse(), "block"), lambda: drawn.append(case.run(other))
    )
    assert torch.equal(torch.as_tensor(drawn[0]), torch.as_tensor(expected))
    for row in errors.values:
        assert [value is None for value in row] == [step % 2 == 0 for step in errors.steps]
        assert all(value is None or 0 < value < 10 for value in row)


def check(row, expected):
    """None where None is expected, else the number within what float32 norms allow."""
    assert [value is None for value in row] == [value is None for value in expected]
    for value, number in zip(row, expected, strict=True):
        assert value is None or value == pytest.approx(number, rel=1e-6)


class Block(nn.Module):
    """Adds 1 + s^2 times a vector, s being the step, ten minus the timestep."""

    def __init__(self, vector):
        super().__init__()
        self.vector = nn.Parameter(vector)

    def forward(self, hidden_states, growth):
        return hidden_states + growth * self.vector


class Toy(nn.Module):
    """Two blocks between nothing."""

    def __init__(self):
        super().__init__()
        vectors = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]], dtype=torch.float64)
        self.blocks = nn.ModuleList(map(Block, vectors))

    def forward(self, hidden_states, timestep):
        growth = 1 + (10 - timestep) ** 2
        for block in self.blocks:
            hidden_states = block(hidden_states, growth)
        return hidden_states


def run_toy(toy, times=1, passes=1, steps=8):
    for seed in range(times):
        x = torch.zeros(2, 4, 3, dtype=torch.float64) + seed
        with torch.no_grad(), diffcache.run(toy):
            for step in range(steps):
                for branch in range(passes):
                    with diffcache.branch(str(branch)):
                        toy(x + branch, torch.tensor(10.0 - step, dtype=torch.float64))


def test_taylor_on_a_parabola():
    """Computed at 0, 1, 4, 7: two lines through 1 + s^2, whose errors are known."""
    toy = Toy()
    before = {name: dict(module.__dict__) for name, module in toy.named_modules()}
    method = TaylorSeer(every=3, order=1, warmup=2, site="block")
    expected = [None, None, 2 / 5, 6 / 10, None, 4 / 26, 10 / 37, None]
    for times, passes in ((1, 1), (3, 1), (2, 2)):  # means over runs and branches of equal numbers
        errors = observe(toy, method, lambda t=times, p=passes: run_toy(toy, t, p))
        assert errors.sites == ["blocks.0", "blocks.1"]
        assert errors.steps == list(range(8))
        for row in errors.values:
            check(row, expected)
    after = {name: dict(module.__dict__) for name, module in toy.named_modules()}
    assert {n: list(d) for n, d in before.items()} == {n: list(d) for n, d in after.items()}
    assert type(toy.blocks) is nn.ModuleList


def test_newton_is_exact_on_a_parabola_and_reuse_is_not():
    toy, steps = Toy(), Listed([0, 1, 2, 5])
    wrong = observe(toy, Combine(steps, Reuse(), "block"), lambda: run_toy(toy))
    exact = observe(toy, Combine(steps, Newton(2), "block"), lambda: run_toy(toy))
    check(wrong.values[1], [None, None, None, 5 / 10, 12 / 17, None, 11 / 37, 24 / 50])
    for row in exact.values:
        assert [s for s, value in enumerate(row) if value is not None] == [3, 4, 6, 7]
        assert all(value is None or value < 1e-12 for value in row)


def test_a_branch_that_pauses_within_a_gap_is_observed_as_a_real_run_has_it():
    """The second branch misses step 2, which is skipped anyway: step 3 is a skip for both."""
    toy = Toy()

    def guided():
        x = torch.zeros(1, 4, 3, dtype=torch.float64)
        with torch.no_grad(), diffcache.run(toy):
            for step in range(8):
                t = torch.tensor(10.0 - step, dtype=torch.float64)
                with diffcache.branch("0"):
                    toy(x, t)
                if step not in (2, 4):
                    with diffcache.branch("1"):
                        toy(x + 1, t)

    method = Combine(Every(4), Reuse(), "block")
    errors = observe(toy, method, guided)
    with diffcache.api.wrapped(toy, method) as handle:
        guided()
        real = [(c.index, c.branch) for c in handle.last.calls if c.computed]
    # the second is computed at 5, after its pause at 4
    assert real == [(0, "0"), (0, "1"), (4, "0"), (5, "1")]
    f = [1.0 + s * s for s in range(8)]
    expected = [
        None if s in (0, 4) else
        (f[s] - f[0 if s < 4 else 4]) / f[s] if s < 6 else
        ((f[s] - f[4]) / f[s] + (f[s] - f[5]) / f[s]) / 2
        for s in range(8)
    ]  # fmt: skip
    check(errors.values[0], expected)


def test_two_denoisers_are_told_apart():
    first, second = Toy(), Toy()

    class Both:
        def __init__(self):
            self.components = {"transformer": first, "transformer_2": second}

    both = Both()

    def call():
        run_toy(first)
        run_toy(second)

    errors = observe(both, Combine(Every(2), Reuse(), "stack"), call)
    assert errors.sites == ["transformer.blocks", "transformer_2.blocks"]
    assert errors.values[0] == errors.values[1]


def test_a_zero_feature_has_an_error_only_if_the_estimate_is_zero_too():
    toy = Toy()
    with torch.no_grad():
        toy.blocks[0].vector.zero_()
    errors = observe(toy, Combine(Every(2), Reuse(), "block"), lambda: run_toy(toy, steps=4))
    assert errors.values[0] == [None, 0.0, None, 0.0]
    check(errors.values[1], [None, 1 / 2, None, 5 / 10])


def test_a_gate_reads_a_toy_as_a_real_run_does():
    """First block: the residual 1 + s^2; skip while it is within 0.9 of the last computed one."""
    toy = Toy()
    method = Combine(Gate(0.9, relative_to="forecast"), Reuse(), "stack", lead=1)
    computed, last = [0], 1.0
    for step in range(1, 8):
        value = 1.0 + step * step
        if abs(value - last) / last >= 0.9:
            computed.append(step)
            last = value
    errors = observe(toy, method, lambda: run_toy(toy))
    assert skipped_steps(errors) == [s for s in range(8) if s not in computed]
    assert 2 < len(computed) < 8
