"""tune: the search on landscapes whose best is known, the shipped model, and the log of trials."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

import diffcache
from diffcache import Combine, Every, FirstBlock, FittedForecast, Listed, Newton, Reuse, Tables, Taylor
from diffcache.errors import AttachError, TablesError
from diffcache.features.combine import reuse_of
from diffcache.features.tuned import Guarantee
from diffcache.offline.tracing import batches_of
from diffcache.offline.tune.guarantee import certify, most_strayed, samples_needed
from diffcache.offline.tune.search import Goal, Search, front_of
from diffcache.offline.tune.space import LEFT_OUT, additions, drops, families, moves, schedules, sites, steps_listed
from diffcache.offline.tune.trial import Trial, Trials, closeness, joined, mean_interval, outputs
from diffcache.offline.tune.tune import _name, _score
from diffcache.registry import rows_of
from tests.calibration.shipped import CALL, PROMPTS, SETTINGS, STEPS, draw


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
def test_tune_returns_the_best_of_what_it_saw_and_goes_on(pipe, tmp_path):
    out = tmp_path / "b.safetensors"
    methods = [
        Combine(Listed(steps, STEPS), Taylor(order), site="stack")
        for steps in ((0, 2), (0, 1), (0, 2, 4))
        for order in (0, 1)
    ]
    settings = {**SETTINGS, "out": out, "speedup": 1.5, "methods": methods, "trials": 12}
    count = []

    def stop(done, total, word):
        count.append(done)
        if done == 4 and len(count) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diffcache.tune(pipe, PROMPTS, progress=stop, **settings)
    assert (tmp_path / "b.safetensors.trials").exists()
    for other in ({"seed": 1}, {"batch_size": 1}, {"steps": STEPS + 1}):
        with pytest.raises(TablesError, match="of another search"):
            diffcache.tune(pipe, PROMPTS, **{**settings, **other})
    best = diffcache.tune(pipe, PROMPTS, progress=stop, **settings)
    assert not (tmp_path / "b.safetensors.trials").exists()
    front = best.front
    assert [t["cost"] for t in front] == sorted(t["cost"] for t in front)
    assert [t["psnr_db"] for t in front] == sorted(t["psnr_db"] for t in front)
    assert best.tables.header["seed"] == 0
    chosen = next(t for t in front if t["validation_psnr_db"] is not None)
    assert chosen["cost"] <= 1 / 1.5
    done = best.validation
    assert done["samples"] == 1 and done["low_db"] <= done["psnr_db"] <= done["high_db"]
    assert done["method"] == repr(best.method)
    again = diffcache.features.tuned.Tuned(out)
    assert again.method == best.method
    with diffcache.wrapped(pipe, "tuned", tables=str(out)):
        draw(pipe)
        done = diffcache.report(pipe)
    listed = sorted({0, *best.parts().when.steps})
    assert [call.index for call in done.calls if call.computed] == listed


def test_every_kind_of_the_built_in_space_is_calibrated_and_tried_or_said_to_be_refused(pipe, monkeypatch):
    tried = []

    def measure(self, method, number):
        tried.append(method)
        if isinstance(method, FirstBlock):
            raise AttachError("no blocks")
        method.abilities()  # raises where tables are missing
        return Trial(repr(method), 0.5, 30.0, 29.0, 31.0, 1.0, 1)

    monkeypatch.setattr(Trials, "_measure", measure)
    settings = {**SETTINGS, "batch_size": 1, "steps": 4}
    best = diffcache.tune(pipe, PROMPTS[:2], speedup=1.5, trials=300, **settings)
    reuses = [reuse_of(method) for method in tried if isinstance(method, Combine)]
    forecasts = {type(reuse.instead).__name__ for reuse in reuses}
    assert forecasts >= {"Reuse", "Taylor", "Newton", "Hermite", "Heun", "Exponentials", "HighBand", "Chebyshev"}
    assert {reuse.site.value for reuse in reuses} == {"model", "stack", "module"}
    on_schedules = {"interval", "taylorseer", "hicache", "foca", "dmd", "freqca"}
    header = best.tables.header
    skipped = {kind.split()[0]: why for kind, why in header["skipped"].items()}
    names = {method.name for method in tried} | on_schedules | set(skipped)
    assert names >= {row.name for row in rows_of("method").values()}
    assert skipped.items() >= LEFT_OUT.items()
    assert skipped["first-block"] == "no blocks"
    dear = {"step-mask", "profilingdit"}  # four steps are fewer than their warm-up
    assert set(skipped) - set(LEFT_OUT) == {"first-block", *dear}
    assert list(header["refused"].values()) == ["no blocks"]


def test_a_goal_that_nothing_meets_says_so(pipe):
    methods = [Combine(Listed((0, 2), STEPS), Taylor(0), site="stack")]
    with pytest.raises(AttachError, match=r"none meets Goal\(.*psnr=99"):
        diffcache.tune(pipe, PROMPTS, psnr=99.0, methods=methods, trials=3, **SETTINGS)


class Landscape:
    """A bench with 20 steps on which the errors of gaps add up; late gaps weigh more."""

    total, uncached_seconds = 20, 2.0

    def __init__(self, gains=None, refused=()):
        self.gains, self.refused, self.runs = gains or {}, refused, []

    def measure(self, method, batches):
        site = reuse_of(method).site.value
        if site in self.refused:
            raise AttachError(f"nothing at {site}")
        steps = steps_listed(method, self.total)
        if steps:
            cost, decibels = self.cost(len(steps)), self.decibels(steps)
            decibels += self.gains.get(repr(reuse_of(method).instead), 0)
        else:
            cost = 0.15 + 0.5 / (1 + 10 * getattr(method, "threshold", 1.0))
            decibels = 30 + 20 * cost
        self.runs.append((steps, cost, decibels, batches))
        each = [decibels + offset for offset in (-2.0, -1.0, 1.0, 2.0)]
        return Trial(repr(method), cost, decibels, decibels, decibels, 2 * cost, 4, each)

    def cost(self, computed):
        return (computed + 0.01 * (self.total - computed)) / self.total

    def decibels(self, steps):
        gaps = zip(steps, (*steps[1:], self.total), strict=True)
        error = sum((end - start - 1) ** 2 * (1 + 3 * start / self.total) for start, end in gaps)
        return 60 - 10 * math.log10(1 + error)

    def best(self, computed):
        others = combinations(range(1, self.total), computed - 1)
        return max(self.decibels((0, *steps)) for steps in others)


def searched(landscape, goal, trials=60):
    search = Search(landscape, goal, [0, 1], trials)
    search.run(families(landscape.total, sites(is_unet=False), []))
    (method, trial), *_ = search.best(search.seen)
    return search, method, trial


@pytest.mark.parametrize("psnr", [33.0, 35.0, 37.5, 40.0, 45.0])
def test_a_search_for_a_psnr_finds_the_least_number_of_steps(psnr):
    landscape = Landscape()
    search, method, trial = searched(landscape, Goal(psnr=psnr))
    least = next(count for count in range(1, 20) if landscape.best(count) >= psnr)
    assert trial.psnr_db >= psnr and len(steps_listed(method, 20)) == least
    assert "no trials were left" not in search.skipped.values()
    assert search.runs == len(landscape.runs) <= 120
    cheapest = math.inf  # so far, that met the goal: no schedule as dear had its first look after
    for steps, cost, decibels, batches in landscape.runs:
        assert not steps or cost < cheapest or batches == [1]
        cheapest = min(cheapest, cost if decibels >= psnr else math.inf)


@pytest.mark.parametrize("goal", [Goal(speedup=4.0), Goal(seconds=0.4)])
@pytest.mark.parametrize("forecast", [Reuse(), Newton(2)])
def test_a_search_for_a_speed_finds_the_best_schedule_and_forecast(goal, forecast):
    landscape = Landscape({repr(forecast): 3.0}, refused=("module",))
    search, method, trial = searched(landscape, goal)
    share = goal.limit / (2.0 if goal.seconds else 1.0)  # a full run takes two seconds
    most = max(count for count in range(1, 20) if landscape.cost(count) <= share)
    assert method.instead == forecast and len(steps_listed(method, 20)) == most
    assert trial.psnr_db == pytest.approx(landscape.best(most) + 3.0)
    assert all(cost <= share for steps, cost, _, _ in landscape.runs[1:] if steps)
    again = Landscape({repr(forecast): 3.0}, refused=("module",))
    searched(again, goal)
    assert again.runs == landscape.runs
    assert set(search.refused.values()) == {"nothing at module"}


def test_little_budget_goes_where_neighbors_did_best_and_the_rest_is_named():
    landscape = Landscape({repr(Newton(2)): 6.0})
    search, method, _ = searched(landscape, Goal(speedup=4.0), trials=28)
    assert search.runs == 56 and method.instead == Newton(2)
    left = [kind for kind, why in search.skipped.items() if why == "no trials were left"]
    assert left and not any("Newton(order=2" in kind for kind in left)


def test_ranks_fronts_and_moves():
    cheap, close, worse = (
        Trial(name, cost, psnr, psnr, psnr, seconds, 1)
        for name, cost, psnr, seconds in (("a", 0.2, 30.0, 1.0), ("b", 0.5, 50.0, 2.0), ("c", 0.6, 40.0, 3.0))
    )
    assert front_of([close, worse, cheap]) == [cheap, close]
    for goal, best in (
        (Goal(speedup=4.0), cheap),
        (Goal(speedup=2.0), close),
        (Goal(psnr=35.0), close),
        (Goal(seconds=1.5), cheap),
    ):
        assert max((cheap, close, worse), key=goal.rank) is best
    assert set(moves((0, 2, 3), 5)) == {(0, 1, 3), (0, 2, 4)}
    assert set(moves((0, 2, 3), 5, together=2)) == {(0, 1, 2), (0, 3, 4)}
    assert set(drops((0, 2, 3))) == {(0, 3), (0, 2)}
    assert set(additions((0, 2, 3), 5)) == {(0, 1, 2, 3), (0, 2, 3, 4)}
    assert set(schedules((0, 1, 2), [], 6)) == {(0, 1, 3), (0, 2, 4), (0, 1, 4)}


def test_closeness_is_that_of_the_pictures_that_are_saved():
    exact = torch.rand(2, 3, 4, 4)
    near, film = (exact + 1e-4).clamp(0, 1), torch.rand(2, 5, 3, 4, 4)
    pictures = [outputs((one,), True) for one in (exact, near, film)]
    assert all(one.dtype == torch.uint8 for one in pictures)
    assert torch.equal(pictures[0], (exact * 255).round().byte())
    error = (pictures[1].double() - pictures[0]).square().flatten(1).mean(1).clamp_min(1e-10)
    expected = (20 * math.log10(255) - 10 * error.log10()).clamp_max(100)
    assert torch.allclose(closeness(pictures[1], pictures[0]), expected)
    frames = [closeness(pictures[2][:, i], pictures[2][:, 0]) for i in range(5)]
    still = pictures[2][:, :1].expand_as(pictures[2])
    assert torch.allclose(closeness(pictures[2], still), torch.stack(frames).mean(0))
    latents = torch.tensor([[11.0, 0.0]]), torch.tensor([[10.0, 0.0]])
    assert outputs((latents[0],), True).dtype == torch.float32  # beyond [0, 1]: no pictures
    assert closeness(*latents)[0] == pytest.approx(10 * math.log10(100 / 0.5))
    mean, low, high = mean_interval(torch.tensor([30.0, 31.0, 32.0, 37.0]))
    assert mean == 32.5 and 30 < low < 32 < mean < high < 36.5


def test_a_log_of_trials_that_was_cut_off(tmp_path, monkeypatch):
    log = tmp_path / "a.trials"
    measured = []

    def measure(self, method, number):
        measured.append(number)
        return Trial(repr(method), 0.5, 30.0, 30.0, 30.0, 1.0, 1, [30.0])

    monkeypatch.setattr(Trials, "_measure", measure)

    def bench(about="x"):
        opened = Trials(None, [["a"], ["b"]], 0, {}, log)
        opened.open_log(about)
        return opened

    method = Combine(Listed((0, 2), STEPS), Taylor(0), site="stack")
    first = bench()
    for batches in ([0], [1], [0, 1], [2]):
        first.measure(method, batches)
    log.write_bytes(log.read_bytes()[:-20])
    again = bench()
    trial = again.measure(method, [0])
    again.measure(method, [1])
    assert measured == [0, 1, 2]  # both together ran one by one
    again.measure(method, [0, 2])  # its line was cut off
    both = replace(trial, samples=2, each=[30.0] * 2)
    assert len(measured) == 4 and bench().measure(method, [0, 2]) == both
    assert len(measured) == 4
    with pytest.raises(TablesError, match="of another search"):
        bench("y")
    for held in (b"", b'{"search'):
        log.write_bytes(held)
        bench("y").measure(method, [0])
        bench("y").measure(method, [0])
    assert len(measured) == 6


def test_a_smaller_batch_costs_as_large_a_share(pipe):
    call = {**CALL, "num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(3)}
    bench = Trials(pipe, batches_of(PROMPTS, 2), 0, call)
    assert bench.measure(Combine(Every(1)), [0]).psnr_db == 100  # each run draws the same noise
    method = Combine(Listed((0, 2), STEPS), Taylor(0), site="stack")
    costs = [bench.measure(method, [number]).cost for number in (0, 1)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-6) and costs[0] < 0.6
    assert steps_listed(diffcache.RegionE(), 28) == ()  # which its plan tells


def test_trials_count_by_the_tables_in_a_file(calibrated, tmp_path, monkeypatch):
    measured = []
    trial = Trial("m", 0.5, 30.0, 30.0, 30.0, 1.0, 1)
    monkeypatch.setattr(Trials, "_measure", lambda *given: measured.append(given) or trial)
    bench, path = Trials(None, [["a"]], 0, {}), tmp_path / "a.safetensors"
    for factor in (1.0, 1.0, 2.0):
        tensors = {name: factor * calibrated.tables[name] for name in calibrated.tables.names()}
        tables = Tables(calibrated.tables.header, tensors).save(path)
        bench.measure(FittedForecast(computed=3, tables=tables), [0])
    assert len(measured) == 2


def test_a_setting_is_certified_while_few_enough_prompts_stray_there_or_at_a_dearer_one():
    assert [samples_needed(share) for share in (0.5, 0.9, 0.95, 0.99)] == [1, 9, 19, 99]
    assert [most_strayed(n, 0.95) for n in (18, 19, 38, 39)] == [-1, 0, 0, 1]
    rows = {
        "dear": [40.0] * 39,
        "fair": [34.0] + [40.0] * 38,
        "odd": [40.0] * 39,  # its first prompt strayed before: it still counts
        "cheap": [40.0, 34.0] + [40.0] * 37,
        "unseen": [],
    }
    chosen, guarantee, counts = certify(list(rows), rows.__getitem__, 35.0, 0.95)
    assert chosen == "odd" and counts == [0, 1, 1, 2]
    assert guarantee == Guarantee(35.0, 0.95, samples=39, strayed=1, settings=5)
    assert "at least 35 dB" in str(guarantee)
    assert certify(["cheap"], lambda _: [34.0, 34.0] + [40.0] * 37, 35.0, 0.95)[0] is None


def test_samples_may_be_scored_by_lpips_or_by_a_judge(monkeypatch):
    from diffcache.eval.metrics import lpips

    class Network:
        def distances(self, a, b):
            return (a.float() - b.float()).abs().flatten(1).mean(1) / 255

    monkeypatch.setattr(lpips, "load", Network)
    plain = torch.stack([torch.full((3, 4, 4), n, dtype=torch.uint8) for n in (0, 51, 102, 102)])
    drawn = torch.stack([torch.full((3, 4, 4), n, dtype=torch.uint8) for n in (51, 51, 0, 102)])
    prompts = ["a", "b", "c", "d"]
    assert _score(0.1, None)(drawn, plain, prompts) == pytest.approx([-0.2, 0, -0.4, 0])
    film = _score(0.1, None)(drawn[None], plain[None], ["a film"])
    assert film == pytest.approx([-0.15])  # mean over its frames
    judge = {("a", 0): True, ("a", 51): False, ("b", 51): True, ("c", 102): False, ("c", 0): False, ("d", 102): True}
    right = _score(None, lambda picture, prompt: judge[prompt, int(picture[0, 0, 0])])
    assert right(drawn, plain, prompts) == [0.0, 1.0, 1.0, 1.0]  # spoilt; as it was wrong before
    assert _score(None, None) is None

    def above(least):
        return lambda a, b: a > least and b != "a phrase !" and a != 17.25

    name = _name(above(1))
    held = list(above(1).__code__.co_consts)  # references, which the digest must not see
    assert name == _name(above(1)) != _name(above(2)) and held
    assert _name(lambda a, b: a > 1) != _name(lambda a, b: a > 2) and _name(None) == ""

    goal = Goal(right=True, confidence=0.75)
    trial = Trial("m", 0.5, 30.0, 29.0, 31.0, 1.0, 4, [30.0] * 4, [0.0, 1.0, 1.0, 1.0])
    assert goal.met(trial) and not Goal(right=True, confidence=0.8).met(trial)
    assert Goal(lpips=0.2).met(replace(trial, scores=[-0.3, -0.1, -0.2, -0.2]))
    assert not Goal(lpips=0.1).met(replace(trial, scores=[-0.3, -0.1, -0.2, -0.2]))
    assert "at most 0.1 LPIPS" in str(Guarantee(-0.1, 0.9, 9, 0, 1, "lpips"))
    assert "judged right wherever" in str(Guarantee(1.0, 0.9, 9, 0, 1, "right"))


def test_a_new_prompt_strays_as_rarely_as_is_certified_and_one_of_another_kind_more_often():
    rng = np.random.default_rng(0)
    ladder, bar, confidence = list(range(8)), 35.0, 0.9

    def draw(count: int, shift: float = 0.0) -> np.ndarray:
        own = rng.normal(0, 3, (count, 1))  # prompts differ, and settings shake each a little
        return 46 - shift - 1.5 * np.arange(8) + own + rng.normal(0, 1, (count, 8))

    new, other = draw(20_000), draw(20_000, shift=4)
    strayed, strayed_of_other = [], []
    for _ in range(1000):
        seen = draw(60)
        chosen, _, _ = certify(ladder, lambda k, seen=seen: seen[:, k], bar, confidence)
        strayed.append(0.0 if chosen is None else float((new[:, chosen] < bar).mean()))
        strayed_of_other.append(float((other[:, chosen or 0] < bar).mean()))
    error = 3 * np.std(strayed) / 1000**0.5
    assert 0.04 < np.mean(strayed) <= 1 - confidence + error
    assert np.mean(strayed_of_other) > 2 * (1 - confidence)


def test_tune_certifies_on_prompts_apart_and_its_file_says_so(pipe, tmp_path, monkeypatch):
    def measure(self, method, number):
        steps = len(steps_listed(method, STEPS))
        score = 30.0 + 3 * steps - (2 if number == 15 else 0)
        return Trial(repr(method), steps / STEPS, score, score, score, 1.0, 1, [score])

    monkeypatch.setattr(Trials, "_measure", measure)
    prompts = [f"a fox on grass, on a {i} background" for i in range(30)]
    methods = [Combine(Listed((0, 2), STEPS)), Combine(Listed((0, 1, 2), STEPS))]
    own = {"psnr": 35.0, "confidence": 0.95, "methods": methods, "steps": STEPS, **CALL}
    out = tmp_path / "sure.safetensors"
    best = diffcache.tune(pipe, prompts, out=out, trials=6, **own)
    assert best.guarantee == Guarantee(35.0, 0.95, samples=20, strayed=0, settings=2)
    assert len(steps_listed(best.method, STEPS)) == 3  # two steps stray on one prompt
    with diffcache.wrapped(pipe, "tuned", tables=str(out)):
        draw(pipe)
        assert "at least 35 dB" in str(diffcache.report(pipe)) and "95%" in str(best.guarantee)
    header = dict(best.tables.header)
    header["guarantee"] = header["guarantee"] | {"strayed": 99}
    with pytest.raises(TablesError, match=r"guarantee=.*in range"):
        diffcache.features.tuned.Tuned(Tables(header, {}))
    with pytest.raises(AttachError, match=r"none is certified .* 20 of 20 prompts strayed .* 0 may"):
        diffcache.tune(pipe, prompts, trials=4, **own | {"psnr": 44.0})
    for wrong, message in (
        ({"batch_size": 2}, "batch_size=2: must be 1 with confidence="),
        ({"confidence": 0.99}, r"takes 99 to validate on .* give at least 149"),
        ({"confidence": 1.0}, r"confidence=1.0: must be between 0 and 1"),
        ({"psnr": None, "speedup": 2.0}, r"confidence=0.95: goes with psnr="),
    ):
        with pytest.raises(ValueError, match=message):
            diffcache.tune(pipe, prompts, **own | wrong)
    with pytest.raises(ValueError, match="is there twice"):
        diffcache.tune(pipe, prompts + prompts[:1], **own)


def test_half_of_the_looks_goes_on_and_a_trial_that_is_behind_is_stopped():
    methods = [Combine(Every(every), Taylor(order)) for every in range(2, 10) for order in (0, 1)]
    ran = []

    class Flat(Landscape):
        def measure(self, method, batches):
            ran.append((methods.index(method), *batches))
            each = [30.0 + methods.index(method) + 0.1 * place for place in range(2)]
            return Trial(repr(method), 0.2, each[0], each[0], each[0], 1.0, 2, each)

    search = Search(Flat(), Goal(speedup=2.0), [0, 1, 2, 3], 100)
    search._spend(1)
    for method in methods:
        search._glance_at(method)
    search._halve()
    counts = [[place for place, batch in ran if batch == n] for n in range(4)]
    assert list(map(len, counts)) == [16, 16, 8, 4] and sorted(counts[2]) == list(range(8, 16))
    assert len(search.seen) == 4 and search.best(search.seen)[0][0] is methods[-1]

    best, worse = (search.seen[repr(methods[place])][1] for place in (15, 14))
    before = len(ran)
    assert search.attempt(methods[0], search.batches, search.seen, rival=best) is None
    assert search.stopped == 1 and len(ran) == before  # two batches were run before
    assert joined([best, worse]).samples == 16 and joined([best]) is best
    assert search._is_lost(replace(worse, each=[*worse.each[:4]]), best)
    noisy = [best.each[0] - 1, best.each[1] + 1.5, best.each[2] - 1.0]
    assert not search._is_lost(replace(worse, each=noisy), best)
    assert not search._is_lost(replace(worse, each=noisy[:2]), best)  # too few to tell

    sure = Search(Flat(), Goal(psnr=35.0, confidence=0.75), [0, 1], 1)
    eight = replace(best, each=[36.0] * 8)
    assert not sure._is_lost(replace(best, each=[34.0, 34.0]), eight)
    assert sure._is_lost(replace(best, each=[34.0, 34.0, 34.0]), eight)
    close = Search(Flat(), Goal(psnr=35.0), [0, 1], 1)
    assert not close._is_lost(replace(best, each=[35.5] * 3), eight)
    assert close._is_lost(replace(best, each=[34.5] * 3), eight)
