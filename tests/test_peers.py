"""Caches of other libraries as rows of an evaluation: counted as they run, gone afterwards."""

import json

import pytest
import torch

from diffcache.errors import UnknownMethodError
from diffcache.eval.cost.flops import count
from diffcache.eval.methods import parse_row
from diffcache.eval.runs import record as records
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.evaluate import Plan
from diffcache.eval.runs.folder import batches
from diffcache.eval.runs.measure import evaluate
from diffcache.eval.runs.peers import mag_ratios_of
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.task import Case, Task

pytestmark = pytest.mark.usefixtures("no_report")
TASK = Task("sticker-flux", samples=2, batch_size=2, steps=8, call={"true_cfg_scale": 1.0, "height": 32, "width": 32})
LITE = "diffusers/taylorseer:cache_interval=3,disable_cache_before_step=2,use_lite_mode=True"


def taylor_schedule(interval: int, before: int, steps: int) -> list[int]:
    """Return the steps that diffusers' TaylorSeer computes.

    After `before` steps it predicts one step and only then starts to count: interval 4, before 3
    is C C C P C P P P C.
    """
    return [s for s in range(steps) if s < before or (s - before - 1) % interval == 0]


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
    uncached = count(drawer.pipe, drawer.arguments(batches(drawer.prompts.texts, 2, 2, 0)[0], 2))
    assert full == uncached.per_step
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


def test_an_evaluation_has_both_kinds_of_rows(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(records, "too_fast", lambda timed, allowed: [f"{len(timed)} timed"])
    names = (LITE, "taylorseer:every=3,warmup=2,site=model")
    plan = Plan(TASK, {name: parse_row(name) for name in names}, tmp_path / "run", rounds=1)
    record = evaluate(plan, Progress())
    rows = {row["name"]: row for row in record["rows"]}
    assert rows[LITE]["computed_steps"] == len(taylor_schedule(3, 2, 8))
    assert rows[LITE]["method"].startswith("TaylorSeerCacheConfig(cache_interval=3")
    assert rows[LITE]["fidelity"]["psnr_db"]["n"] == 2
    timed = record["timing"]["rows"]
    assert f"{len(timed)} timed" in record["warnings"]
    assert set(timed) == {row["name"] for row in record["rows"]}
    assert all({"ratio", "cpu_ratio", "denoiser_ratio"} <= set(row) for row in timed.values())
    again = evaluate(plan, Progress())
    assert [row["fidelity"] for row in again["rows"]] == [r["fidelity"] for r in record["rows"]]


def test_mag_cache_is_calibrated_by_its_own_mode(drawer: Drawer, tmp_path) -> None:
    call = drawer.arguments(batches(drawer.prompts.texts, 2, 2, 9)[0], 8)
    ratios = mag_ratios_of(drawer.pipe, call)
    assert len(ratios) == 8 and ratios[0] == 1 and all(0.5 < ratio < 1.5 for ratio in ratios)
    assert not drawer.pipe.transformer.is_cache_enabled
    file = tmp_path / "ratios.json"
    file.write_text(json.dumps({"mag_ratios": ratios}))
    text = f"diffusers/mag-cache:tables={file},threshold=9.0,max_skip_steps=2,retention_ratio=0.0"
    assert parse_row(text).total == 8 and "mag_ratios=[1.0, " in repr(parse_row(text))
    steps = [whole for _, whole in draw(drawer, text).about["cache"]["steps"]]
    assert steps == [1, 0, 0, 1, 0, 0, 1, 0]
    with pytest.raises(ValueError, match="mag-cache: made for 8 steps, and the run has 6"):
        drawer.wrapped(Case(text, "method", 6, parse_row(text))).__enter__()


class TestCacheDit:
    MASK = "cache-dit/dbcache:Fn_compute_blocks=1,max_warmup_steps=1,steps_computation_mask=10010010"
    STATIC = f"{MASK},steps_computation_policy=static"

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("cache_dit")

    def test_steps_and_operations_are_those_of_the_mask(self, drawer: Drawer) -> None:
        cache = draw(drawer, self.STATIC).about["cache"]
        assert [whole for _, whole in cache["steps"]] == [1, 0, 0, 1, 0, 0, 1, 0]
        full = (cache["flops_computed"] + cache["flops_saved"]) / 8
        assert 3 * full < cache["flops_computed"] < 4 * full  # a block of each of five skipped
        more = draw(drawer, f"{self.STATIC},taylorseer_order=1").about["cache"]
        assert more["held_bytes"] > cache["held_bytes"] > 0

    def test_model_and_class_are_left_as_they_were(self, drawer: Drawer) -> None:
        pipe, before = drawer.pipe, draw(drawer).samples
        call, blocks = type(pipe).__call__, list(pipe.transformer.state_dict())
        attributes = [set(vars(module)) for module in pipe.transformer.modules()]
        assert not all(map(torch.equal, draw(drawer, self.STATIC).samples, before))
        assert type(pipe).__call__ is call and list(pipe.transformer.state_dict()) == blocks
        assert [set(vars(module)) for module in pipe.transformer.modules()] == attributes
        assert all(map(torch.equal, draw(drawer).samples, before))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("cache-dit/teacache", "there is cache-dit/dbcache"),
            ("cache-dit/dbcache:blocks=1", "no setting 'blocks'; there are cache_type"),
            ("cache-dit/dbcache:Fn_compute_blocks=0", "Fn_compute_blocks=0: must be 1 or more"),
            ("cache-dit/dbcache:steps_computation_mask=12", "must be of 0 and 1"),
        ],
    )
    def test_wrong_settings(self, text: str, message: str) -> None:
        with pytest.raises((ValueError, UnknownMethodError), match=message):
            parse_row(text)

    def test_a_mask_of_another_length_is_refused(self, drawer: Drawer) -> None:
        with pytest.raises(ValueError, match="made for 9 steps, and the run has 8"):
            draw(drawer, f"{self.MASK}1")
