"""BAC: what it measures, its schedules by brute force, and runs against an independent loop."""

import itertools
from typing import get_args

import pytest
import torch
from torch.nn import functional

from diffcache.features.bac import BAC, Metric, bubble, widest
from diffcache.features.collect import RunInfo
from diffcache.features.tables import Tables
from diffcache.offline.bac_collect import THIN, PairCollector, compare
from diffcache.offline.calibrate import calibrate
from diffcache.pipelines.policy import DiffusionPolicyPipeline, scheduler
from diffcache.pipelines.policy_transformer import TransformerForDiffusion
from diffcache.step import Step

STEPS = 12
SITES = [
    f"decoder.layers.{layer}.{child}" for layer in range(2) for child in ("self_attn", "multihead_attn", "linear2")
]


def tiny_policy():
    torch.manual_seed(3)
    sizes = dict(input_dim=2, output_dim=2, horizon=4, n_obs_steps=2, cond_dim=3, n_layer=2, n_head=2, n_emb=16)
    model = TransformerForDiffusion(**sizes, causal_attn=True)
    for parameter in model.parameters():  # random features that change a lot
        torch.nn.init.normal_(parameter, std=0.3)
    pipe = DiffusionPolicyPipeline(model.eval(), scheduler(), n_action_steps=2)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, steps=STEPS):
    seen = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1))
    return pipe(seen, steps, torch.Generator().manual_seed(2)).chunk


def observations(count=3):
    seen = torch.randn(count, 2, 2, 3, generator=torch.Generator().manual_seed(5))
    return [{"observation": part} for part in seen]


def tables(pairs, metric="cosine", **header):
    """Tables from site -> pairs; the shift falls with the site's place."""
    steps = len(next(iter(pairs.values())))
    tensors = {}
    for number, (site, matrix) in enumerate(pairs.items()):
        tensors[f"pairs.{site}"] = matrix.float()
        tensors[f"shift.{site}"] = torch.full((steps, steps), float(10 - number))
    about = {"method": "bac", "steps": steps, "sites": list(pairs), "metric": metric}
    return Tables(about | header, tensors)


def random_pairs(seed, steps=STEPS, sites=SITES):
    generator = torch.Generator().manual_seed(seed)
    return {site: torch.rand(steps, steps, generator=generator) for site in sites}


def calibrated_like(pipe, pairs):
    """Tables of given pairs with the header of a real calibration."""
    real = calibrate(pipe, BAC(1, union=0), observations(1), steps=STEPS).tables
    return tables(pairs, **{k: v for k, v in real.header.items() if k not in ("sites", "metric")})


@pytest.mark.parametrize("objective", ["anchor", "adjacent"])
@pytest.mark.parametrize("metric", get_args(Metric))
def test_schedule_equals_brute_force(objective, metric, agrees):
    """Every schedule of a size is scored by the definition; cosine is maximised, all else not."""
    best = max if metric == "cosine" else min
    for seed, count in itertools.product(range(4), (1, 2, 3, 5)):
        pairs = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))
        scores = {}
        for inner in itertools.combinations(range(1, 8), count - 1):
            starts = (0, *inner)
            score = 0.0
            for step in range(8):
                anchor = max(s for s in starts if s <= step)
                if objective == "anchor":
                    score += float(pairs[anchor, step])
                elif step > anchor:
                    score += float(pairs[step - 1, step])
            scores[starts] = score
        made = BAC(count, metric, objective, 0).starts(pairs)
        found, wanted = ([torch.tensor(each)] for each in (scores[tuple(made)], best(scores.values())))
        agrees("bac", "all schedules, with the paper's costs", found, wanted, 1e-6)
        assert len(made) == count


def test_union_by_hand():
    """A site takes the steps of its own and deeper feed-forwards, enlarged ones included."""
    given = {"l.0.attn": (0, 1), "l.0.ff": (0, 2), "l.1.attn": (0, 3), "l.1.ff": (0, 4), "l.2.ff": (0, 5)}
    assert bubble(given, []) == given
    assert bubble(given, ["l.1.attn"]) == given | {"l.1.attn": (0, 3, 4, 5)}
    assert bubble(given, ["l.2.ff"]) == given
    made = bubble(given, ["l.0.attn", "l.0.ff"])
    assert made == given | {"l.0.attn": (0, 1, 2, 4, 5), "l.0.ff": (0, 2, 4, 5)}
    # a chosen feed-forward, already enlarged, is seen by those after it in its layer
    swapped = {"l.0.ff": (0, 2), "l.0.attn": (0, 1), "l.1.ff": (0, 4)}
    assert bubble(swapped, list(swapped))["l.0.attn"] == (0, 1, 2, 4)


def test_official_forces_the_last_step_and_leaves_a_single_union_out():

    made = BAC(3, union=1, tables=tables(random_pairs(0))).schedules()
    official = BAC(3, union=1, official=True, tables=tables(random_pairs(0))).schedules()
    plain = BAC(3, union=0, tables=tables(random_pairs(0))).schedules()
    assert official == {site: tuple(sorted({*u, STEPS - 1})) for site, u in plain.items()}
    assert len(made[SITES[0]]) > 3  # the widest site took the feed-forwards' steps
    assert made == bubble(plain, SITES[:1])
    assert widest({"a": 1.0, "b": 3.0, "c": 3.0, "d": 2.0}, 3) == ["b", "c", "d"]  # of equal ones the first


@pytest.mark.parametrize("metric", get_args(Metric))
def test_metrics_are_what_they_say(metric):

    rows = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0)).double()
    made = compare(rows, metric)
    for b, i, j in itertools.product(range(2), range(5), range(5)):
        x, y = rows[b, i], rows[b, j]
        expected = {
            "cosine": x @ y / (x.norm() * y.norm()),
            "mse": (x - y).square().mean(),
            "l1": (x - y).abs().mean(),
            "l2": (x - y).square().sum().sqrt(),
            "wasserstein": (x.sort().values - y.sort().values).abs().mean(),
        }[metric]
        assert float(made[b, i, j]) == pytest.approx(float(expected), abs=1e-12)


def test_calibration_measures_every_site():
    """The tables equal what hooks on an unwrapped policy see, averaged over runs and samples."""
    pipe = tiny_policy()
    method = calibrate(pipe, BAC(4, union=2), observations(), steps=STEPS, seed=7)
    assert method.tables.header["sites"] == SITES
    seen = {site: [] for site in SITES}
    hooks = [
        pipe.transformer.get_submodule(site).register_forward_hook(
            lambda module, args, out, site=site: seen[site].append(out)
        )
        for site in SITES
    ]
    for number, given in enumerate(observations()):
        pipe(**given, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(7 + number))
    for hook in hooks:
        hook.remove()
    for site in SITES:
        rows = torch.stack(seen[site]).reshape(3, STEPS, 2, -1).transpose(1, 2).flatten(0, 1)
        alike = functional.cosine_similarity(rows[:, :, None], rows[:, None], dim=-1).mean(0)
        torch.testing.assert_close(method.tables[f"pairs.{site}"], alike, atol=1e-5, rtol=1e-5)
        shift = (rows[:, :, None] - rows[:, None]).abs().mean((0, 3))
        torch.testing.assert_close(method.tables[f"shift.{site}"], shift, atol=1e-5, rtol=1e-5)
    # one calibration serves every count, objective and union
    other = BAC(6, objective="adjacent", union=0, tables=method.tables)
    assert all(len(steps) == 6 for steps in other.schedules().values())


def test_large_activations_are_thinned():
    """Evenly, so that a constant difference stays what it is."""
    collector = PairCollector(BAC(1, metric="l1"))
    collector.begin(RunInfo(0, 0, torch.arange(2.0), None, 2))
    for step in range(2):
        value = torch.full((1, 3 * THIN + 5), float(step))
        collector.feature(Step(step, 0.0, 2, 0, 0), "b.0.ff", 0, value)
    kept = [t for steps in collector._seen.values() for part in steps.values() for t in part]
    assert [tuple(t.shape) for t in kept] == [(1, THIN)] * 2
    collector.end()
    assert collector.tables()["pairs.b.0.ff"].tolist() == [[0, 1], [1, 0]]


def test_tensors_of_one_site_are_compared_as_one():
    runs = torch.randn(3, 4, 2, 2, 6, generator=torch.Generator().manual_seed(0))
    whole = PairCollector(BAC(1, metric="mse"))
    for run in runs:
        whole.begin(RunInfo(0, 0, torch.arange(4.0), None, 4))
        for step, branch in itertools.product(range(4), range(2)):
            for index, site in itertools.product(range(2), ("b.0.ff", "b.0.attn")):
                part = run[step][:, index] + branch + len(site)
                whole.feature(Step(step, float(step), 4, branch, 0), site, index, part)
        whole.end()
    assert whole.settings() == {"sites": ["b.0.ff", "b.0.attn"], "metric": "mse"}
    rows = runs.flatten(3)
    mse = (rows[:, :, None] - rows[:, None]).square().mean((0, 3, 4))
    torch.testing.assert_close(whole.tables()["pairs.b.0.ff"], mse)
