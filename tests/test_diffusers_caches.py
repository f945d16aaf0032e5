"""Caches of diffusers as rows of an evaluation: counted as they run, and gone afterwards."""

import pytest
import torch

from diffcache import TaylorSeer
from diffcache.errors import AttachError, UnknownMethodError
from diffcache.eval.cost.flops import denoiser_flops
from diffcache.eval.diffusers_caches import DiffusersCache
from diffcache.eval.methods import parse_row
from diffcache.eval.peers import taylor_schedule
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.evaluate import Plan
from diffcache.eval.runs.folder import batches
from diffcache.eval.runs.measure import evaluate
from diffcache.eval.runs.progress import Progress
from diffcache.eval.runs.task import Case, Task

TASK = Task("shapes-flux", samples=2, batch_size=2, steps=8)
LITE = "diffusers/taylorseer:cache_interval=3,disable_cache_before_step=2,use_lite_mode=True"


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    torch.set_num_threads(1)
    return Drawer(TASK)


def draw(drawer: Drawer, text: str = "", timed: bool = False):
    batch = batches(drawer.prompts.texts, 2, 2, 0)[0]
    case = Case(text or "uncached", "method" if text else "uncached", 8, text and parse_row(text))
    case = case if text else Case("uncached", "uncached", 8)
    with drawer.wrapped(case):
        return drawer.draw(case, batch, timed=timed)


def test_steps_and_operations_are_those_that_ran(drawer: Drawer) -> None:
    cache = draw(drawer, LITE).about["cache"]
    computed = [step for step, (_, whole) in enumerate(cache["steps"]) if whole]
    assert computed == taylor_schedule(3, 2, 8)
    full = (cache["flops_computed"] + cache["flops_saved"]) / 8
    uncached = denoiser_flops(
        drawer.pipe, drawer.arguments(batches(drawer.prompts.texts, 2, 2, 0)[0], 2)
    )
    assert full == uncached
    assert len(computed) * full <= cache["flops_computed"] < (len(computed) + 0.5) * full
    assert cache["held_bytes"] > 0


def test_watching_changes_nothing_and_leaves_nothing(drawer: Drawer) -> None:
    before = draw(drawer).samples
    watched, timed = draw(drawer, LITE), draw(drawer, LITE, timed=True)
    assert "cache" not in timed.about
    assert all(map(torch.equal, watched.samples, timed.samples))
    assert not all(map(torch.equal, watched.samples, before))
    assert all(map(torch.equal, draw(drawer).samples, before))


def test_attention_alone_is_left_out_of_steps_that_do_not_count(drawer: Drawer) -> None:
    text = (
        "diffusers/pyramid-attention-broadcast:spatial_attention_block_skip_range=2,"
        "spatial_attention_timestep_skip_range=(0, 1001)"
    )
    cache = draw(drawer, text).about["cache"]
    assert [whole for _, whole in cache["steps"]] == [1, 0, 1, 0, 1, 0, 1, 0]
    assert 0 < cache["flops_saved"] < cache["flops_computed"]


def test_an_evaluation_has_both_kinds_of_rows(tmp_path) -> None:
    names = (LITE, "taylorseer:every=3,warmup=2,site=model")
    plan = Plan(TASK, {name: parse_row(name) for name in names}, tmp_path / "run", rounds=1)
    record = evaluate(plan, Progress(quiet=True))
    rows = {row["name"]: row for row in record["rows"]}
    assert rows[LITE]["computed_steps"] == len(taylor_schedule(3, 2, 8))
    assert rows[LITE]["method"].startswith("TaylorSeerCacheConfig(cache_interval=3")
    assert rows[LITE]["fidelity"]["psnr_db"]["n"] == 2
    assert set(record["timing"]["rows"]) == {row["name"] for row in record["rows"]}
    again = evaluate(plan, Progress(quiet=True))
    assert [row["fidelity"] for row in again["rows"]] == [r["fidelity"] for r in record["rows"]]


def test_bad_names_and_settings_are_refused() -> None:
    with pytest.raises(UnknownMethodError, match="there are diffusers/faster-cache"):
        parse_row("diffusers/teacache")
    with pytest.raises(ValueError, match="no setting 'every'; there are cache_interval"):
        parse_row("diffusers/taylorseer:every=3")
    with pytest.raises(ValueError, match="mag_ratios"):
        parse_row("diffusers/mag-cache")
    assert parse_row("taylorseer:every=4") == TaylorSeer(every=4)


def test_a_model_without_such_caches_is_an_error() -> None:
    drawer = Drawer(Task("shapes-unet", samples=1, steps=2))
    cache = DiffusersCache("diffusers/first-block", {"threshold": 0.1})
    refused = pytest.raises(AttachError, match="has no enable_cache; leave this row out")
    with refused, cache.applied(drawer.pipe):
        pass
