"""Small methods against their peers' code, step by step."""

import math
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

import diffcache
from diffcache.features.collect import RunInfo
from diffcache.features.dbcache import DBCache
from diffcache.features.dbprune import DBPrune
from diffcache.features.dpcache import DPCache, key_steps
from diffcache.features.easycache import EasyCache
from diffcache.features.fastercache import FasterCache
from diffcache.features.lazycache import LazyCache
from diffcache.features.pab import PAB
from diffcache.features.speca import SpeCa
from diffcache.features.step_mask import LEVELS, StepMask, mask_of
from diffcache.features.step_reuse import StepReuse
from diffcache.features.tables import Tables
from diffcache.offline.fitted_collect import Lines
from diffcache.step import Site, Step
from tests.features.test_profilingdit import Toy
from tests.internals import computed_steps, reuse_in
from tests.zoo.catalog import cases
from tests.zoo_runs import sample

STEPS = 16


@pytest.mark.parametrize("threshold", [0.25, 0.5])
@pytest.mark.parametrize("longest", [1, 3])
def test_peer_step_reuse_step_by_step(threshold, longest, agrees):
    """Reused steps are neither compared nor counted as real; the first two and the last are."""
    case = cases()["FluxTransformer2DModel"]
    model = case.build()
    given = [case.kwargs(model, 0, step=s, steps=STEPS) for s in range(STEPS)]
    first, second = given[0]["hidden_states"], case.kwargs(model, 1, step=0)["hidden_states"]
    for step in range(STEPS):  # a path that is first straight, then bent
        share = step / STEPS / 8 if step < 9 else step / STEPS
        given[step]["hidden_states"] = (1 - share) * first + share * second
    expected, computed, history, left = [], [], None, 0
    with torch.no_grad():
        for step in range(STEPS):
            if left and 2 <= step < STEPS - 1:
                left -= 1
                expected.append(history)
                continue
            real = model(**given[step], return_dict=False)[0]
            alike = history is not None and (real - history).abs().mean() < (threshold * history.abs().mean())
            history, left = real, longest if alike else 0
            computed.append(step)
            expected.append(real)
        with diffcache.wrapped(model, StepReuse(threshold, longest)) as handle:
            with diffcache.run(model, steps=STEPS):
                found = [model(**each, return_dict=False)[0] for each in given]
            steps = [call.index for call in handle.last.calls if call.computed], computed
    agrees("step-reuse", "SGLang's code, as a loop", found, expected, 0.0, steps)
    assert 2 < len(computed) < STEPS


SHOWN = {  # as cache-dit 1.5 prints them
    ("slow", 28): "1111111101110011100110010001",
    ("medium", 28): "1111110110001100011000110001",
    ("fast", 28): "1111110100010000100000100001",
    ("ultra", 28): "1111001000001000000100000001",
    ("medium", 8): "11110101",
    ("ultra", 9): "111001001",
    ("fast", 4): "1101",
    ("slow", 6): "111001",
}


def shown(mask):
    return "".join(map(str, map(int, mask)))


@pytest.mark.parametrize(("level", "total"), SHOWN)
def test_masks_are_those_published(level, total):
    assert shown(mask_of(level, total)) == SHOWN[level, total]


def test_peer_masks_of_every_length(agrees):
    steps_mask = pytest.importorskip("cache_dit").steps_mask
    lengths = [(total, level) for total in (4, 6, *range(8, 121)) for level in LEVELS]
    ours = [shown(mask_of(level, total)) for total, level in lengths]
    theirs = [shown(steps_mask(total_steps=total, mask_policy=level)) for total, level in lengths]
    agrees("step-mask", "cache-dit, run", steps=(ours, theirs))


def test_the_gate_has_a_say_in_what_the_mask_leaves_out_only():
    total = 28
    probes = [torch.tensor([2 + math.sin(s / 2), 1 + s / 10]) for s in range(total)]
    masked = [s for s, c in enumerate(mask_of("ultra", total)) if c]
    expected, kept = [], None
    for index, probe in enumerate(probes):
        changed = kept is None or (probe - kept).abs().sum() / kept.abs().sum() >= 0.3
        if index in masked or changed:
            expected.append(index)
            kept = probe
    assert computed_steps(StepMask("ultra", threshold=0.3), total, probes) == expected
    assert len(masked) < len(expected) < total
    assert computed_steps(StepMask("ultra", dynamic=False), total) == masked


PAB_STEPS = 12


@pytest.mark.parametrize("cls", ["WanTransformer3DModel", "FluxTransformer2DModel"])
def test_peer_pab_step_by_step(cls, agrees):
    from diffusers import PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast

    case = cases()[cls]
    model, theirs, index = case.build(), case.build(), 0
    plain = sample(case, model, PAB_STEPS)
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=(100, 800),
        cross_attention_timestep_skip_range=(100, 800),
        current_timestep_callback=lambda: 1000 * (1 - index / PAB_STEPS),
    )
    apply_pyramid_attention_broadcast(theirs, config)
    expected = []
    with torch.no_grad():
        for index in range(PAB_STEPS):
            given = case.kwargs(model, 0, step=index, steps=PAB_STEPS)
            expected.append(theirs(**given, return_dict=False)[0].clone())
    with diffcache.wrapped(model, PAB(cross_every=3)) as handle:
        with diffcache.run(model, steps=PAB_STEPS):
            found = sample(case, model, PAB_STEPS)
        kinds = set(reuse_in(handle).setup.kinds.values())
    assert kinds == ({"self", "cross"} if cls.startswith("Wan") else {"self"})
    is_whole = [torch.equal(*pair) for pair in zip(found, plain, strict=True)]
    theirs = [torch.equal(*pair) for pair in zip(expected, plain, strict=True)]
    agrees("pab", "diffusers, run", found, expected, 0.0, (is_whole, theirs))
    for index in range(PAB_STEPS):  # 3 to 10 are inside 0.2 to 0.9 of the run
        within = 3 <= index <= 10 and (index % 2 or (index % 3 and len(kinds) > 1))
        assert is_whole[index] == (not within)


def test_kinds_of_attention_have_intervals_of_their_own():
    when = PAB().parts().when
    assert [i for i in range(10) if when.computes_at(Step(i, total=10), "self")] == [0, 1, 2, 4, 6, 8, 9]
    assert when.computes_at(Step(7, total=10), "of another kind")


SIGMAS = [(1 - s / STEPS) ** 1.5 for s in range(STEPS + 1)]


def euler(case, model, call):
    """Sample with Euler's method; return the outputs of all steps."""
    x = case.kwargs(model, 0, step=0, steps=STEPS)["hidden_states"]
    outs = []
    with torch.no_grad():
        for step in range(STEPS):
            given = case.kwargs(model, 0, step=step, steps=STEPS)
            outs.append(call({**given, "hidden_states": x}, step).clone())
            x = x + (SIGMAS[step + 1] - SIGMAS[step]) * outs[-1]
    return torch.stack(outs)


@pytest.mark.parametrize(("threshold", "warmup"), [(0.2, 3), (0.5, 1), (1.5, 4)])
def test_peer_lazycache_step_by_step(threshold, warmup, agrees):
    case = cases()["FluxTransformer2DModel"]
    model = case.build()
    rate = total = kept_x = kept_clean = None
    computed = []

    def comfy(given, step):
        nonlocal rate, total, kept_x, kept_clean
        x, sigma = given["hidden_states"], SIGMAS[step]
        if warmup <= step < STEPS - 1 and rate is not None:
            total += float(rate * (x - kept_x).abs().mean() / kept_clean.abs().mean())
            if total < threshold:
                return (x - (x + kept_clean - kept_x)) / sigma
        total = 0.0
        out = model(**given, return_dict=False)[0]
        clean = x - sigma * out
        if kept_x is not None:
            rate = (clean - kept_clean).abs().mean() / (x - kept_x).abs().mean()
        kept_x, kept_clean = x, clean
        computed.append(step)
        return out

    expected = euler(case, model, comfy)
    with diffcache.wrapped(model, LazyCache(threshold, warmup)) as handle:
        with diffcache.run(model, steps=STEPS, sigmas=SIGMAS[:-1]):
            found = euler(case, model, lambda given, _: model(**given, return_dict=False)[0])
        steps = [call.index for call in handle.last.calls if call.computed], computed
    agrees("lazycache", "ComfyUI's code, as a loop", [found], [expected], 1e-5, steps)
    assert warmup < len(computed) < STEPS


DBPRUNE_STEPS = 10


def path(case, model):
    """Inputs of a run along a line between two samples, first slowly."""
    first, last = (case.kwargs(model, seed, step=0)["hidden_states"] for seed in (0, 1))
    for step in range(DBPRUNE_STEPS):
        share = (step / DBPRUNE_STEPS) ** 3
        given = case.kwargs(model, 0, step=step, steps=DBPRUNE_STEPS)
        yield {**given, "hidden_states": (1 - share) * first + share * last}


@pytest.mark.parametrize(("threshold", "lead", "warmup"), [(0.1, 0, 2), (0.3, 2, 1), (1e9, 1, 3)])
def test_peer_dbprune_step_by_step(threshold, lead, warmup, agrees):
    """A Wan model whose blocks are wrapped by hand: each keeps its input and what it adds."""
    case = cases()["WanTransformer3DModel"]
    model, theirs, now = case.build(), case.build(), [0]
    ran, kept = [], {}

    def pruned(block, number):
        run = block.forward

        def forward(hidden_states, *args, **kwargs):
            if number in kept and now[0] >= warmup and number >= lead:
                before, added = kept[number]
                if (hidden_states - before).abs().mean() / before.abs().mean() < threshold:
                    return hidden_states + added
            out = run(hidden_states, *args, **kwargs)
            kept[number] = hidden_states, out - hidden_states
            ran.append((now[0], number))
            return out

        block.forward = forward

    for number, block in enumerate(theirs.blocks):
        pruned(block, number)
    expected, found, counts = [], [], []
    with torch.no_grad():
        for now[0], given in enumerate(path(case, theirs)):
            expected.append(theirs(**given, return_dict=False)[0])
        method = DBPrune(threshold, lead=lead, warmup=warmup)
        with diffcache.wrapped(model, method) as handle, diffcache.run(model, steps=DBPRUNE_STEPS):
            found = [model(**given, return_dict=False)[0] for given in path(case, model)]
            assert handle.held_bytes() == 2 * (len(model.blocks) - lead) * stream_bytes(handle)
            counts = [call.counts["blocks"][0] for call in handle.last.calls]
    steps = counts, [sum(s == step for s, _ in ran) for step in range(DBPRUNE_STEPS)]
    agrees("dbprune", "cache-dit's code, as a loop", found, expected, 1e-5, steps)
    assert 0 < sum(counts) < DBPRUNE_STEPS * len(model.blocks)


def stream_bytes(handle):
    (tensor,) = {t.shape: t for t in handle.denoisers[0].tensors(handle.run())}.values()
    assert reuse_in(handle).setup.probe == "input"
    return tensor.nbytes


TOTAL = 10


def table(seed=0):
    torch.manual_seed(seed)
    return torch.rand(TOTAL, TOTAL, TOTAL, dtype=torch.float64)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("longest", [None, 3])
@pytest.mark.parametrize(("count", "first"), [(3, 2), (5, 2), (6, 3), (9, 3), (10, 10)])
def test_peer_dpcache_is_the_best_of_all_schedules(count, first, longest, last, agrees):
    """Every set of steps, with the cost that SGLang gives it."""
    errors, found = table(), {}
    for chosen in combinations(range(first, TOTAL), count - first):
        keys = [*range(first), *chosen, TOTAL]
        gaps = [b - a for a, b in pairwise(keys)]
        if (longest is None or max(gaps) <= longest) and (not last or TOTAL - 1 in keys):
            found[tuple(keys[:-1])] = sum(
                errors[keys[n - 2], keys[n - 1], keys[n - 1] + 1 : keys[n]].sum().item()
                for n in range(first, len(keys))
            )
    if not found:
        with pytest.raises(ValueError, match=f"computed={count}: no schedule of 10 steps"):
            key_steps(errors, count, first, longest, last)
        return
    best = min(found, key=found.__getitem__)
    steps, error = key_steps(errors, count, first, longest, last)
    costs = [torch.tensor([error])], [torch.tensor([found[best]])]
    agrees("dpcache", "all schedules, with SGLang's costs", *costs, 1e-6, (steps, best))


def test_the_calibration_measures_lines():
    torch.manual_seed(1)
    lines = Lines(DPCache(3, site=Site.STACK))
    features = torch.randn(2, TOTAL, 1, 3, 2)
    for run in features:
        lines.begin(RunInfo(0, 0, torch.arange(TOTAL), None, TOTAL))
        for index, feature in enumerate(run):
            lines.feature(Step(index), "blocks.3", 0, feature)
        lines.end()
    errors = lines.tables()["errors"]
    for i, j, t in ((0, 1, 2), (2, 5, 9), (3, 4, 8)):
        guess = features[:, j] + (features[:, j] - features[:, i]) / (j - i) * (t - j)
        expected = sum((guess[n] - features[n, t]).abs().mean() for n in range(2))
        assert errors[i, j, t] == pytest.approx(float(expected), rel=1e-5)
    assert errors[5, 3, 8] == errors[2, 5, 4] == 0
    with torch.inference_mode():
        tables = Tables({"method": "dpcache", "steps": TOTAL, "site": "stack"}, {"errors": table()})
    before = tables["errors"].clone()
    assert DPCache(5, tables=tables).parts().when.steps[:3] == (0, 1, 2)
    assert torch.equal(tables["errors"], before)


def probes(total):
    return [torch.tensor([2 + math.sin(0.5 * s), 1 + 0.1 * s]) for s in range(total)]


@pytest.mark.parametrize("threshold", [0.05, 0.15, math.inf])
@pytest.mark.parametrize("longest", [None, 1, 3])
@pytest.mark.parametrize("skips", [None, 4])
@pytest.mark.parametrize("warmup", [1, 5])
def test_the_schedule_follows_an_independent_trace(threshold, longest, skips, warmup):
    steps, kept, row, left = [], None, 0, skips
    for index, probe in enumerate(probes(30)):
        alike = kept is not None and (probe - kept).abs().sum() / kept.abs().sum() < threshold
        if alike and index >= warmup and row != longest and left != 0:
            row, left = row + 1, None if left is None else left - 1
            continue
        steps.append(index)
        kept, row = probe, 0
    method = DBCache(threshold, warmup=warmup, longest=longest, skips=skips)
    assert computed_steps(method, 30, probes(30)) == steps
    assert skips is None or 30 - len(steps) <= skips


def test_steps_before_a_late_branch_are_none_that_it_skipped():
    when = DBCache(math.inf, warmup=1, skips=3, by_branch=True).parts().when
    state, seen = when.init(), []
    for index, probe in enumerate(probes(12)[5:], start=5):
        seen.append(when.should_compute(state, Step(index), probe))
        if seen[-1]:
            when.computed(state, Step(index), probe)
    assert seen == [True, False, False, False, True, True, True]


@pytest.fixture(scope="module")
def easycache_made():
    case = cases()["FluxTransformer2DModel"]
    return case, case.build()


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
def test_official_easycache_step_by_step(easycache_made, threshold, warmup, since, agrees):
    case, model = easycache_made
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


FASTERCACHE_STEPS = 20
SAME = ("hidden_states", "timestep")


def halves(case, model, step, seed=0):
    """Return the arguments of the guided and of the unguided call of a step."""
    given = case.kwargs(model, seed, step=step, steps=FASTERCACHE_STEPS)
    text = given["encoder_hidden_states"]
    one = {name: given[name][:1] for name in SAME}
    return [{**one, "encoder_hidden_states": each} for each in (text[:1], text[1:])]


def run(case, model, order=("cond", "uncond"), total=FASTERCACHE_STEPS):
    """Return the outputs of both branches of all steps of a wrapped model's run."""
    found = []
    with torch.no_grad(), diffcache.run(model, steps=total):
        for step in range(total):
            pair = halves(case, model, step)
            outs = {}
            for name in order if step else ("cond", "uncond"):
                with diffcache.branch(name):
                    given = pair[name == "uncond"]
                    outs[name] = model(**given, return_dict=False)[0].clone()
            found.append(torch.stack([outs["cond"], outs["uncond"]]))
    return torch.stack(found)


def call(model, name, given):
    """Call a wrapped model in a branch."""
    with diffcache.branch(name), torch.no_grad():
        model(**given)


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
@pytest.mark.parametrize(("every", "low", "high"), [(5, 1.1, 1.1), (3, 1.2, 0.9)])
def test_peer_fastercache_step_by_step(every, low, high, agrees):
    from diffusers.hooks import FasterCacheConfig, apply_faster_cache

    case = cases()["WanTransformer3DModel"]
    model, theirs, index = case.build(), case.build(), 0
    config = FasterCacheConfig(
        unconditional_batch_skip_range=every,
        alpha_low_frequency=low,
        alpha_high_frequency=high,
        spatial_attention_timestep_skip_range=(2000, 2000),  # never: the other part of it
        current_timestep_callback=lambda: 1000 * (1 - index / FASTERCACHE_STEPS),
    )
    apply_faster_cache(theirs, config)
    expected = []
    with torch.no_grad():
        for index in range(FASTERCACHE_STEPS):
            cond, uncond = halves(case, model, index)
            both = {name: torch.cat([uncond[name], cond[name]]) for name in cond}
            expected.append(theirs(**both, return_dict=False)[0].unsqueeze(1).flip(0))
    with diffcache.wrapped(model, FasterCache(every=1)):
        plain = run(case, model)
    with diffcache.wrapped(model, FasterCache(every, low=low, high=high)) as handle:
        found = run(case, model)
        calls = [call for call in handle.last.calls if not call.computed]
    assert torch.equal(found[:, 0], plain[:, 0])
    skipped = [s for s in range(FASTERCACHE_STEPS) if s / FASTERCACHE_STEPS >= 0.36 and s % every]
    assert {call.branch for call in calls} == {"uncond"}
    # where diffusers ran the unguided half, its output is that of a run without a cache
    far = [(both - one)[1].abs().max() > 1e-4 for both, one in zip(expected, plain, strict=True)]
    theirs = [step for step in range(FASTERCACHE_STEPS) if far[step]]
    steps = [call.index for call in calls], theirs
    agrees("fastercache", "diffusers, run", found, expected, 1e-5, steps)
    assert theirs == skipped
    assert (found - plain)[skipped, 1].abs().amax((1, 2, 3, 4, 5)).min() > 1e-4


@pytest.mark.parametrize(("hold", "outputs"), [(None, 3), ("bf16", 2.5)])
def test_bytes_are_told_before_a_run(hold, outputs):
    """An output of the guided branch, as itself and packed, and two bands of the other's."""
    case = cases()["WanTransformer3DModel"]
    model, output = case.build(), 4 * 2 * 8 * 8 * 4
    size = {"height": 64, "width": 64, "frames": 5, "text_tokens": 6, "batch": 1}
    expected = diffcache.expected_bytes(model, "fastercache", hold=hold, branches=2, **size)
    with diffcache.wrapped(model, FasterCache(), hold=hold) as handle:
        run(case, model, total=8)
        assert handle.last.peak_bytes == expected["model"] == outputs * output


SPECA_STEPS = 24


class Headed(Toy):
    """Blocks and a layer behind them, which always runs."""

    def __init__(self):
        super().__init__(4, 16)
        self.head = nn.Linear(16, 16)

    def forward(self, hidden_states, timestep):
        return self.head(super().forward(hidden_states, timestep))


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
    for step, (x, time) in enumerate(zip(samples, times, strict=True)):
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
        if kind == "full":
            hidden = x
            for block in model.blocks[:-1]:
                hidden = block(hidden, time)
            out = model.head(model.blocks[-1](hidden, time))
            taken = order if step >= warmup - 1 and step > anchor else 0
            features = differences(features, hidden - x, step - anchor, taken)
            outputs = differences(outputs, out, step - anchor, taken)
            anchor = step
            computed.append(step)
        else:
            hidden = x + forecast(features, step - anchor)
            out = model.head(model.blocks[-1](hidden, time))
            if check:
                guess = forecast(outputs, step - anchor)
                error = ((guess - out).abs().mean() / out.abs().mean()).item()
        drawn.append(out)
    return computed, drawn


@pytest.mark.parametrize("threshold", [0.02, 0.08, 0.3])
@pytest.mark.parametrize(("shortest", "longest", "warmup"), [(2, 8, 3), (1, 4, 1), (3, 6, 6)])
def test_official_steps_one_by_one(threshold, shortest, longest, warmup, agrees):
    torch.manual_seed(0)
    model = Headed().eval()
    first, second = torch.randn(2, 1, 20, 16)
    shares = [(step / SPECA_STEPS) ** 2 for step in range(SPECA_STEPS)]
    samples = [(1 - share) * first + share * second for share in shares]
    times = [torch.tensor([1 - step / SPECA_STEPS]) for step in range(SPECA_STEPS)]
    settings = dict(
        threshold=threshold, decay=0.3, floor=0.01, shortest=shortest, longest=longest, order=2, warmup=warmup
    )
    with torch.no_grad():
        computed, drawn = official(model, samples, times, **settings)
        with diffcache.wrapped(model, SpeCa(**settings)) as handle:
            with diffcache.run(model, steps=SPECA_STEPS):
                found = [model(x, timestep=t) for x, t in zip(samples, times, strict=True)]
            steps = [call.index for call in handle.last.calls if call.computed], computed
    agrees("speca", "counters of the official code, as a loop", found, drawn, 1e-5, steps)
    assert 3 <= len(computed) < SPECA_STEPS / 2 + 1
