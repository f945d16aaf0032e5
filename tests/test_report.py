"""The report: its counts against closed forms, its text, its JSON and its timeline."""

import json
import math
import re
from base64 import b64decode
from html import unescape
from io import BytesIO

import pytest
import torch
from PIL import Image

import diffcache
from diffcache import Combine, Interval, Listed, TaylorSeer
from diffcache.attach.record import CallRecord
from diffcache.run_report import Report, human
from diffcache.timeline import lanes_of, steps_of, timeline_text
from tests.zoo.catalog import cases

STEPS = 12


@pytest.fixture(scope="module")
def flux():
    case = cases()["FluxTransformer2DModel"]
    return case, case.build(0)


def run(flux, method, steps=STEPS, after=None):
    """Run a bare FLUX under a method and return its report, taken before it is unwrapped."""
    case, model = flux
    with diffcache.wrapped(model, method), torch.no_grad():
        for step in range(steps):
            model(**case.kwargs(model, 0, step=step, steps=steps))
        if after is not None:
            after(model)
        return diffcache.report(model)


def call(index, branch=0, computed=True, denoiser="transformer", **more):
    counts = {"blocks": (4, 0) if computed else (0, 4)}
    return CallRecord(denoiser, index, 1.0 - index, branch, computed, "method", 0.5, counts, **more)


class Record:
    """Stands for a handle: only what a report reads."""

    def __init__(self, calls, peak_bytes=0):
        self.calls, self.peak_bytes, self.finished = calls, peak_bytes, True
        self.computed = sum(c.counts["blocks"][0] for c in calls)
        self.skipped = sum(c.counts["blocks"][1] for c in calls)
        self.last, self.method, self.remarks, self.choice = self, Interval(), [], None
        self.texts = None

    def held_bytes(self):
        return 0


class TestCounts:
    @pytest.mark.parametrize(("every", "warmup"), [(2, 1), (3, 1), (5, 3), (4, 2)])
    def test_equal_the_closed_form(self, flux, every, warmup):
        report = run(flux, TaylorSeer(every=every, warmup=warmup, site="stack"))
        computed = warmup + (STEPS - warmup) // every
        assert report.steps_computed == computed
        assert report.steps_skipped == STEPS - computed
        counts = (4 * computed, 4 * (STEPS - computed))
        lists = dict.fromkeys(("transformer_blocks", "single_transformer_blocks"), counts)
        assert report.sites == {"model": lists}
        assert report.computed == 8 * computed
        assert report.skipped == 8 * (STEPS - computed)

    def test_flops_follow_the_counts(self, flux):
        report = run(flux, Interval(every=3))
        assert report.flops_saved == pytest.approx(2 * report.flops_computed)

    def test_operations_of_one_skipped_block(self, flux):
        method = Combine(Listed(range(0, STEPS, 3)), site="run", blocks="transformer_blocks.1")
        report = run(flux, method)
        (first, *_) = report.calls
        assert report.skipped == STEPS - 4
        assert 0.1 < report.flops_saved / (STEPS - 4) / sum(first.flops) < 0.2

    def test_unknown_operations_are_none(self):
        report = Report(Record([call(0, flops=(8.0, 0.0)), call(1, computed=False)]))
        assert report.flops_computed is None and report.flops_saved is None
        assert "not counted" in str(report)

    def test_means_leave_the_first_call_out(self):
        calls = [call(0), call(1), call(2, computed=False)]
        calls[0].reason, calls[0].seconds, calls[2].seconds = "first call", 9.0, 0.1
        report = Report(Record(calls))
        assert report.seconds == pytest.approx(9.6)
        assert report.seconds_computed == 0.5 and report.seconds_skipped == 0.1

    def test_bytes(self, flux):
        seen = []
        held = run(flux, Interval(), after=lambda m: seen.append(diffcache.report(m).held_bytes))
        assert seen == [held.held_bytes] and 0 < held.held_bytes <= held.peak_bytes
        report = run(flux, Interval(), after=diffcache.reset)
        assert report.held_bytes == 0 < report.peak_bytes

    def test_snapshot_stays_as_it_is(self, flux):
        case, model = flux
        with diffcache.wrapped(model, Interval()), torch.no_grad():
            model(**case.kwargs(model, 0))
            before = diffcache.report(model)
            text = before.to_json()
            model(**case.kwargs(model, 0, step=1))
            assert before.to_json() == text != diffcache.report(model).to_json()


class TestPlainData:
    def test_json_round_trip(self, flux):
        report = run(flux, Interval(every=4))
        data = json.loads(report.to_json())
        assert data == report.to_dict()
        assert data["schema"] == 2
        assert eval(data["method"], {"Interval": Interval}) == Interval(every=4)
        assert len(data["calls"]) == STEPS
        assert sum(step["computed"] for step in data["calls"]) == 3
        assert data["sites"]["model"]["transformer_blocks"] == {"computed": 12, "skipped": 36}

    def test_empty_report(self, flux):
        report = run(flux, Interval(), steps=0)
        assert json.loads(report.to_json())["calls"] == []
        assert report.flops_computed is None and report.seconds_computed is None
        assert "No denoiser call yet" in str(report)


class TestText:
    def test_holds_the_numbers(self, flux):
        report = run(flux, Interval(every=3))
        text = report.to_text(width=100)
        assert text.startswith("Interval(every=3, warmup=1, site='stack')")
        rows = {line.split()[1]: line.split()[2:4] for line in text.splitlines() if "blocks " in line}
        assert rows["transformer_blocks"] == ["16", "32"]
        assert "12: 4 computed, 8 skipped" in text
        assert "66.7 %" in text
        assert human(report.flops_saved) in text
        assert human(report.peak_bytes, "B") in text
        assert "█··█··█··█··" in text

    def test_forced_calls_are_named(self):
        calls = [call(0), call(1, computed=False), call(2)]
        calls[2].reason = "inputs changed"
        assert "forced   1 call was computed: inputs changed" in str(Report(Record(calls)))

    @pytest.mark.parametrize(
        ("number", "unit", "text"),
        [
            (0, "B", "0 B"),
            (999, "", "999"),
            (1234, "", "1.23 k"),
            (2.5e9, "", "2.5 G"),
            (2.5 * 2**30, "B", "2.5 GiB"),
            (1023, "B", "0.999 KiB"),
            (2**20 - 1, "B", "1 MiB"),
            (999_600, "", "1 M"),
            (1.5e15, "", "1.5 P"),
        ],
    )
    def test_human(self, number, unit, text):
        assert human(number, unit) == text


class TestTimeline:
    def test_steps_by_index_and_by_repeated_branch(self):
        calls = [call(0, "a"), call(0, "b"), call(1, "a"), call(0, "a"), call(0, "a")]
        assert [len(step) for step in steps_of(calls)] == [2, 1, 1, 1]

    def test_lanes_of_two_denoisers_stand_side_by_side(self):
        calls = [call(0), call(1, computed=False), call(0, denoiser="transformer_2")]
        lanes = {lane.label: lane.marks for lane in lanes_of(calls)}
        assert lanes == {"transformer branch 0": [True, False, None], "transformer_2 branch 0": [None, None, True]}

    def test_text_wraps_at_the_width(self):
        text = timeline_text([call(i, "cond", i % 5 == 0) for i in range(125)], width=60)
        rows = [line for line in text.splitlines() if line.strip().startswith("cond")]
        assert len(rows) == math.ceil(125 / 50)
        assert max(map(len, text.splitlines())) <= 60
        assert "".join(row.split()[1] for row in rows).count("█") == 25


class TestNotebook:
    def test_shows_the_table_the_totals_and_the_steps(self, flux):
        report = run(flux, Interval(every=3))
        page = report._repr_html_()
        words = " ".join(unescape(re.sub("<[^>]*>", " ", page)).split())
        assert words.startswith("Interval(every=3, warmup=1, site='stack')")
        assert "transformer_blocks 16 32 66.7 %" in words
        assert "steps 12: 4 computed, 8 skipped" in words
        (source,) = re.findall('src="data:image/png;base64,([^"]*)"', page)
        picture = Image.open(BytesIO(b64decode(source)))
        assert picture.tobytes() == report.timeline_image().tobytes()

    def test_escapes_what_a_method_says(self):
        record = Record([call(0), call(1)])
        record.method = type("Odd", (Interval,), {"__repr__": lambda self: "<script>"})()
        page = Report(record)._repr_html_()
        assert "&lt;script&gt;" in page and "<script>" not in page
