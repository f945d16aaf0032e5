"""Reports of records: read and joined, as tables, plots, sheets of samples and a page."""

import copy
import csv
import io
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from diffcache.eval.metrics.intervals import share_interval
from diffcache.eval.report import docs, heat, pareto, plots, strips, words
from diffcache.eval.report.__main__ import main
from diffcache.eval.report.columns import Column, bytes_text, decimals, shown
from diffcache.eval.report.docs import update
from diffcache.eval.report.palette import OKABE_ITO, styles
from diffcache.eval.report.records import Value, checked, join, ordered
from diffcache.eval.report.samples import Samples
from diffcache.eval.report.table import markdown, table_of, terminal_table, to_csv
from diffcache.eval.report.write import write_report, write_reports


def test_wrong_records_are_refused(make_record: Any) -> None:
    record = make_record()
    record["rows"][2]["name"] = "taylorseer"
    with pytest.raises(ValueError, match="names that differ"):
        checked(record)
    with pytest.raises(ValueError, match="'uncached'"):
        checked(make_record() | {"rows": make_record()["rows"][1:]})
    for timing in (
        7,
        {"rows": [None]},
        {"rows": {"interval": 7}},
        {"rows": {"interval": {"ratio": -1}}},
    ):
        with pytest.raises(ValueError, match="timing.rows: .* must be an object"):
            checked(make_record() | {"timing": timing})
    record = make_record()
    record["rows"][0]["fidelity"] = [None]
    with pytest.raises(ValueError, match=r"fidelity: \[None\] must be an object"):
        checked(record)


def test_runs_of_one_task_are_joined(make_record: Any, renamed: Any) -> None:
    first = make_record()
    joined = join([first, renamed(first, "interval", "taylorseer"), first])
    names = [row_["name"] for row_ in joined["rows"]]
    assert names == [row_["name"] for row_ in first["rows"]] + ["taylorseer (2)"]
    times = first["timing"]["rows"]
    assert joined["timing"]["rows"]["taylorseer (2)"] == times["interval"]
    assert joined["timing"]["rows"]["taylorseer"] == times["taylorseer"]
    assert join([first])["rows"] == first["rows"]


def test_matches_follow_a_new_name(make_record: Any) -> None:
    first, second = make_record(), make_record()
    for row_ in second["rows"][1:]:
        row_["hash"] = row_["hash"][::-1] + "x"
    joined = join([first, second])
    names = [row_["name"] for row_ in ordered(joined)]
    assert names[names.index("taylorseer (2)") + 1] == "uncached, 3 steps (2)"


@pytest.mark.parametrize(
    "task", [{"model": "other"}, {"samples": 8}, {"seed": 1}, {"reference": "x"}]
)
def test_runs_of_different_tasks_are_never_mixed(make_record: Any, task: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"different tasks.*{next(iter(task))}"):
        join([make_record(), make_record(**task)])


def test_times_of_different_machines_are_left_out(make_record: Any, renamed: Any) -> None:
    second = renamed(make_record(), "interval", "other")
    second["env"]["device"] = "another processor"
    joined = join([make_record(), second])
    assert joined["timing"]["rows"] == {}
    assert any("different machines" in text for text in joined["warnings"])


@pytest.mark.parametrize(
    ("one", "other", "direction", "outcome"),
    [
        (Value(3, 2, 4), Value(6, 5, 7), "up", -1),
        (Value(3, 2, 4), Value(6, 5, 7), "down", 1),
        (Value(3, 2, 5), Value(6, 5, 7), "down", 0),
        (Value(3), Value(6, 5, 7), "down", None),
        (None, Value(6, 5, 7), "down", None),
        (Value(3, 2, 4), Value(6, 5, 7), None, None),
    ],
)
def test_better_means_that_intervals_do_not_overlap(
    one: Any, other: Any, direction: Any, outcome: Any
) -> None:
    assert words.compare(one, other, direction) == outcome


def test_summary_says_whether_a_cache_beats_fewer_steps(make_record: Any) -> None:
    said = "\n".join(words.summary(make_record()))
    assert "64 pictures of shapes-flux at 12 steps." in said
    assert "taylorseer against uncached, 3 steps: better in FID-lite, PSNR" in said
    assert "first-block against uncached, 4 steps: worse in PSNR" in said
    assert "taylorseer: 3 evaluations a sample, FLOPs ratio 4, 4 times as fast" in said


def test_rows_stand_under_what_they_are_to_be_compared_with(make_record: Any, row: Any) -> None:
    names = [row["name"] for row in ordered(make_record())]
    assert names == [
        "uncached", "taylorseer", "uncached, 3 steps", "first-block", "interval", "uncached, 4 steps",
    ]  # fmt: skip
    labels = [row.label for row in table_of(make_record()).rows]
    assert labels[2] == "↳ uncached, 3 steps"
    assert labels[5] == "↳ uncached, 4 steps (for first-block, interval)"


def test_numbers_are_those_of_the_record(cells: Any, make_record: Any) -> None:
    record = make_record()
    for row_ in record["rows"]:
        for key in ("fid_lite", "prompt_accuracy"):
            text = cells(record, key)[row_["name"]].text
            found = [float(n) for n in re.findall(r"-?\d+\.\d+", text)]
            wanted = [row_["quality"][key][part] for part in ("value", "low", "high")]
            assert found == pytest.approx(
                wanted, abs=0.5 * 10 ** -(2 if key == "fid_lite" else 3) + 1e-9
            )
    assert cells(record, "seconds")["taylorseer"].text == "0.30 (0.29, 0.33)"
    assert cells(record, "held_bytes")["interval"].text == "352 KiB"


def test_best_is_bold_and_never_the_uncached_row(
    cells: Any, interval: Any, make_record: Any
) -> None:
    record = make_record()
    record["rows"][0]["quality"]["fid_lite"] = interval(0.1, 0.01)
    for column in table_of(record).columns:
        found = cells(record, column.key)
        bold = {name for name, cell in found.items() if cell.bold}
        values = {n: c.number for n, c in found.items() if n != "uncached" and c.number is not None}
        if column.direction is None or len(set(values.values())) == 1:
            assert not bold
        else:
            best = (max if column.direction == "up" else min)(values.values())
            assert bold == {name for name, value in values.items() if value == best}
    assert {n for n, c in cells(record, "psnr_db").items() if c.bold} == {"interval"}
    assert {n for n, c in cells(record, "lpips_lite").items() if c.bold} == {"interval"}


def test_nothing_is_bold_without_a_rival(make_record: Any) -> None:
    record = make_record()
    record["rows"] = record["rows"][:2]
    assert not any(cell.bold for row_ in table_of(record).rows for cell in row_.cells)


def test_nothing_is_bold_where_all_are_equal(cells: Any, interval: Any, make_record: Any) -> None:
    record = make_record()
    for row_ in record["rows"]:
        row_["quality"]["prompt_accuracy"] = interval(1.0, 0.0)
    assert not any(cell.bold for cell in cells(record, "prompt_accuracy").values())


def test_dagger_stands_where_the_interval_of_the_change_holds_zero(
    cells: Any, make_record: Any
) -> None:
    record = make_record()
    found = cells(record, "fid_lite_change")
    for row_ in record["rows"][1:]:
        change = row_["quality"]["fid_lite_change"]
        assert found[row_["name"]].dagger is (change["low"] <= 0 <= change["high"])
    assert {name for name, cell in found.items() if cell.dagger} == {"taylorseer", "interval"}
    text = markdown(table_of(record))
    assert text.count("]†") == 2
    record["rows"][1]["quality"]["fid_lite_change"] |= {"low": 0.01}
    assert not cells(record, "fid_lite_change")["taylorseer"].dagger


def test_reference_has_a_dash_and_what_was_not_measured_says_so(
    cells: Any, make_record: Any
) -> None:
    record = make_record()
    record["rows"][2]["fidelity"]["ssim"] = {"value": None}
    del record["timing"]["rows"]["interval"]
    assert cells(record, "psnr_db")["uncached"].text == "—"
    assert cells(record, "fid_lite_change")["uncached"].text == "—"
    assert cells(record, "ssim")["first-block"].text == "n/a"
    assert cells(record, "seconds")["interval"].text == "n/a"


def test_columns_follow_the_record(make_record: Any) -> None:
    record = make_record()
    keys = [column.key for column in table_of(record).columns]
    assert keys == [
        "evaluations", "flops_ratio", "seconds", "ratio", "throughput", "peak_bytes", "held_bytes",
        "fid_lite", "fid_lite_change", "fid_lite_to_uncached", "psnr_db", "ssim", "lpips_lite", "prompt_accuracy", "kid_lite",
    ]  # fmt: skip
    record["timing"] = {}
    for row_ in record["rows"]:
        row_["quality"]["own_score"] = {"value": 2.0}
    shorter = [column.key for column in table_of(record).columns]
    timed = ("seconds", "ratio", "throughput", "peak_bytes")
    assert shorter == [key for key in keys if key not in timed] + ["own_score"]
    heads = {column.key: column.heading for column in table_of(record).columns}
    assert heads["psnr_db"] == "PSNR (dB) ↑ [95 %]"
    assert heads["fid_lite_to_uncached"] == "FID-lite to uncached ↓"
    assert heads["own_score"] == "own score"


def test_chosen_columns_come_in_their_order(make_record: Any) -> None:
    table = table_of(make_record(), ["ssim", "evaluations"])
    assert [column.key for column in table.columns] == ["ssim", "evaluations"]
    with pytest.raises(
        ValueError, match=r"columns=\['sim'\]: the record has evaluations, flops_ratio"
    ):
        table_of(make_record(), ["sim"])


def test_a_footnote_says_which_interval_is_which(make_record: Any) -> None:
    record = make_record()
    assert "[95 %]: bootstrap interval over the samples." in table_of(record).notes
    right = torch.arange(64) < 50
    for row_ in record["rows"]:
        row_["quality"]["prompt_accuracy"] = share_interval(right).to_dict()
    only = ("psnr_db", "prompt_accuracy", "fid_lite_change")
    assert table_of(record, only).notes[1] == (
        "[95 %] over the samples: bootstrap interval (PSNR, FID-lite, change); Wilson's "
        "interval of shares (prompt accuracy)."
    )
    record["rows"][1]["outcomes"] = {"fid_lite": "01"}
    assert "Bonett and Price's interval of paired shares (FID-lite, ch" in table_of(record).notes[1]


def test_footnotes_name_back_ends_and_warnings(make_record: Any) -> None:
    notes = "\n".join(table_of(make_record()).notes)
    assert (
        "FID-lite to uncached, LPIPS-lite, KID-lite: lite (shapes-features abababababab)" in notes
    )
    assert "not comparable with published figures" in notes
    assert "Warning: 64 samples are few" in notes
    assert "not finished" not in notes
    assert "not finished" in "\n".join(table_of(make_record() | {"finished": False}).notes)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Value(31.234, 31.1, 31.4), "31.2 [31.1, 31.4]"),
        (Value(0.98765, 0.98712, 0.98811), "0.9877 [0.9871, 0.9881]"),
        (Value(1234.5), "1234"),
        (Value(0.0), "0.00"),
        (Value(-2.5), "\N{MINUS SIGN}2.50"),
    ],
)
def test_numbers_have_the_digits_they_need(found: Value, text: str) -> None:
    column = Column("k", "t", "quality", None, "interval", "number", lambda row: None)
    assert shown(found, column, decimals([found])) == text


def test_changes_have_signs_and_zero_has_none_below_it() -> None:
    column = Column("k", "t", "quality", None, "interval", "change", lambda row: None)
    assert shown(Value(-0.004, -1, 1), column, 2) == "+0.00 [\N{MINUS SIGN}1.00, +1.00]"


def test_bytes_are_readable() -> None:
    assert [bytes_text(n) for n in (0, 512, 1024, 1536, 360_448, 5 << 30)] == [
        "0 B", "512 B", "1 KiB", "1.5 KiB", "352 KiB", "5 GiB",
    ]  # fmt: skip


def test_csv_holds_full_precision(make_record: Any) -> None:
    record = make_record()
    record["rows"][1]["fidelity"]["psnr_db"]["value"] = 1 / 3
    read = list(csv.DictReader(io.StringIO(to_csv(record))))
    assert [line["name"] for line in read] == [row_["name"] for row_ in ordered(record)]
    assert float(read[1]["psnr_db"]) == 1 / 3
    assert read[0]["psnr_db"] == ""
    assert float(read[1]["psnr_db.p5"]) == 28.5
    assert float(read[1]["kid_lite.spread"]) == 0.0002
    assert float(read[1]["seconds.median"]) == pytest.approx(0.3)
    record["rows"][1]["name"] = "=HYPERLINK(A1)"  # which a spreadsheet would run
    assert "\n'=HYPERLINK(A1)," in to_csv(record)
    assert read[5]["matches"] == "first-block; interval"


def test_markdown_has_as_many_cells_in_every_line(make_record: Any) -> None:
    record = make_record()
    record["rows"][1]["name"] = "a|b <script> *c*"
    lines_ = [line for line in markdown(table_of(record)).splitlines() if line.startswith("|")]
    counts = {len(re.findall(r"(?<!\\)\|", line)) for line in lines_}
    assert len(lines_) == 2 + len(record["rows"]) and counts == {len(table_of(record).columns) + 2}
    assert r"a\|b &lt;script> \*c\*" in lines_[3]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_terminal_table_fits_and_leaves_no_number_out(make_record: Any, width: int) -> None:
    record = make_record()
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(terminal_table(record))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    for row_ in table_of(record).rows:
        assert all(cell.text in text for cell in row_.cells)


@pytest.mark.parametrize("upward", [True, False])
def test_front_is_what_brute_force_finds(upward: bool) -> None:
    chance = random.Random(0)
    sign = 1 if upward else -1
    for _ in range(200):
        places = [
            (chance.randint(0, 6), chance.randint(0, 6)) for _ in range(chance.randint(1, 14))
        ]
        found = pareto.front(places, upward)
        unbeaten = {
            (x, y)
            for x, y in places
            if not any(u >= x and sign * v >= sign * y and (u, v) != (x, y) for u, v in places)
        }
        assert [places[i] for i in found] == sorted(unbeaten)
    assert pareto.front([], upward) == []


def test_a_method_keeps_its_color_everywhere(make_record: Any, row: Any) -> None:
    record = make_record()
    looks = styles(record)
    record["rows"].insert(1, row("z", "method", 2, 1.0, []) | {"method": "Taylorseer(every=9)"})
    assert styles(record)["z"].color == styles(record)["taylorseer"].color == OKABE_ITO[0]
    assert styles(record)["z"].dash != styles(record)["taylorseer"].dash
    assert len({looks[n].color for n in ("taylorseer", "first-block", "interval")}) == 3
    assert looks["uncached, 3 steps"].color == looks["uncached, 4 steps"].color
    assert looks["uncached, 3 steps"].marker == "x"


def test_settings_of_a_method_are_told_apart_by_what_differs() -> None:
    rows = [{"name": f"taylor every={n}, order=1", "method": f"T(every={n})"} for n in (3, 5)]
    rows.append({"name": "gate", "method": "Gate()"})
    assert plots.settings(rows) == {
        r["name"]: f"every={n}" for r, n in zip(rows, (3, 5), strict=False)
    }


def test_every_plot_is_drawn(run: Any) -> None:
    _, folder, files = run
    names = {file.name for file in files}
    stems = ["pareto-fid_lite_change", "pareto-lpips_lite", "pareto-psnr_db", "pareto-prompt_accuracy",
             "timeline", "latent-error", "cost", *(f"site-error-{n}" for n in (1, 2, 3))]  # fmt: skip
    for stem in stems:
        assert {f"{stem}.png", f"{stem}.svg"} <= names
        with Image.open(folder / "report" / f"{stem}.png") as opened:
            edge = np.asarray(opened.convert("L"))
        assert len(np.unique(edge)) > 20 and (edge != 255).mean() > 0.02
        # Nothing runs off the figure: its outermost pixels are those of the ground.
        assert min(edge[0].min(), edge[-1].min(), edge[:, 0].min(), edge[:, -1].min()) == 255


def test_missing_data_is_said_in_words(make_record: Any) -> None:
    record = make_record()
    record["timing"] = {}
    for row_ in record["rows"]:
        row_ |= {"timeline": None, "latent_error": None, "site_error": None, "flops": None}
        row_ |= {"held_bytes": 0, "flops_ratio": None}
    drawn, left_out = plots.draw(record)
    assert drawn == []
    assert [text.partition(":")[0] for text in left_out] == [
        "Quality against speed", "Decisions", "Error of the latents", "Errors by site", "Cost",
    ]  # fmt: skip


def test_a_metric_in_which_all_rows_are_equal_is_not_plotted(make_record: Any) -> None:
    record = make_record()
    for row_ in record["rows"]:
        row_["quality"]["prompt_accuracy"] = {"value": 1.0, "low": 1.0, "high": 1.0, "n": 64}
    drawn, left_out = plots.draw_pareto(record)
    assert "pareto-prompt_accuracy" not in {plot.stem for plot in drawn} and drawn
    assert left_out == ["Quality against speed: all rows are equal in prompt accuracy."]
    record["rows"][1]["quality"]["prompt_accuracy"]["low"] = 0.99
    drawn, left_out = plots.draw_pareto(record)
    assert "pareto-prompt_accuracy" in {plot.stem for plot in drawn} and not left_out


def test_empty_plots_are_none() -> None:
    assert heat.plot_errors([[None, None]], ["a"], [0, 1], "m") is None
    assert heat.plot_errors([], [], [], "m") is None


def test_errors_of_zero_and_of_one_size_can_be_drawn() -> None:
    for values in ([[0.0, 0.0]], [[0.01, 0.01]], [[0.0, None]], [[1e-12, 3.0]]):
        figure = heat.plot_errors(values, ["a"], [0, 1], "m")
        figure.draw_without_rendering()
        low, high = figure.axes[0].collections[0].get_clim()
        assert 0 < low < high and high >= max(v or 0 for v in values[0])


def test_sheet_shows_the_pixels_and_their_difference(
    make_record: Any, make_run: Any, picture: Any, tmp_path: Path
) -> None:
    record = make_record()
    record["rows"] = record["rows"][:2]
    make_run(tmp_path, record)
    sheets, left_out = strips.draw(record, [tmp_path])
    assert [sheet.stem for sheet in sheets] == ["samples-worst", "samples-median", "samples-best"]
    assert left_out == []
    shown_pixels = np.asarray(sheets[2].image)
    wide = 6 * 32
    base = picture(3, 0).astype(int)
    theirs = np.asarray(Image.open(tmp_path / record["rows"][1]["folder"] / "samples/00003.png"))
    left, top = 16, 16 + 22
    for place, wanted in (
        ((left, top), base),
        ((left + wide + 12, top), theirs),
        ((left + wide + 12, top + wide + 26), np.minimum(5 * abs(theirs - base), 255)),
    ):
        x, y = place
        panel = shown_pixels[y : y + wide, x : x + wide][3::6, 3::6]
        assert np.array_equal(panel, wanted)


def test_narrow_samples_stand_side_by_side(
    make_record: Any, make_run: Any, picture: Any, tmp_path: Path
) -> None:
    record = make_record()
    record["rows"] = record["rows"][:2]
    make_run(tmp_path, record)
    sheet = np.asarray(strips.draw(record, [tmp_path])[0][0].image)
    side = 6 * 32
    pitch = 2 * side + 12 + 2 * 16
    assert record["rows"][1]["samples"]["worst"] == [1, 0] and sheet.shape[1] == 2 * pitch
    for place, number in enumerate((1, 0)):
        left = 16 + place * pitch
        shown = sheet[38 : 38 + side, left : left + side][3::6, 3::6]
        assert np.array_equal(shown, picture(number, 0))


def test_closeness_is_the_psnr() -> None:
    one = np.zeros((4, 4, 3), np.uint8)
    assert strips.closeness(one, one) == "identical"
    assert strips.closeness(one, one + 255) == "PSNR 0.0 dB"
    wanted = 10 * math.log10(255**2 / 9)
    assert strips.closeness(one, one + 3) == f"PSNR {wanted:.1f} dB"


def test_methods_take_turns_in_the_choice_of_samples() -> None:
    methods = [
        {"name": "a", "samples": {"worst": [7, 2, 9]}},
        {"name": "b", "samples": {"worst": [7, 5]}},
        {"name": "c", "samples": None},
    ]
    assert strips.picks(methods, "worst", 3) == [(7, "a"), (2, "a"), (5, "b")]
    assert strips.picks(methods, "best", 3) == []


def test_damaged_and_foreign_files_are_not_shown(
    make_record: Any, make_run: Any, tmp_path: Path
) -> None:
    record = make_record()
    make_run(tmp_path / "run", record)
    file = tmp_path / "run" / record["rows"][0]["folder"] / "samples" / "00000.png"
    file.write_bytes(file.read_bytes()[:60])
    samples = Samples([tmp_path / "run"])
    assert samples.picture(record["rows"][0], 0) is None
    assert samples.picture(record["rows"][0], 1).shape == (32, 32, 3)
    (tmp_path / "samples").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "samples" / "00000.png")
    assert samples.picture({"folder": ".."}, 0) is None
    moved = {"hash": "0123456789abcdef"}
    assert samples.picture(moved, 1) is None
    (tmp_path / "run/cases/taylorseer").rename(tmp_path / "run/cases/any-name-01234567")
    assert samples.picture(moved, 1) is not None


def test_films_have_contact_sheets_and_previews(
    brief_record: Any, read_page: Any, tmp_path: Path
) -> None:
    pytest.importorskip("av")
    from diffcache.eval.samples.clips import write_clip, write_preview

    record = brief_record()
    record["task"]["kind"] = "films"
    record["rows"] = record["rows"][:2]
    for row_ in record["rows"]:
        row_ |= {"timeline": None, "latent_error": None, "site_error": None, "quality": {}}
        clips = tmp_path / row_["folder"] / "clips"
        clips.mkdir(parents=True)
        frames = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
        frames[:, 0] = torch.arange(5)[:, None, None] * 40
        frames[:, 1] = 90 if row_["name"] == "taylorseer" else 0
        write_clip(clips / "00001.mp4", frames, 8)
        (clips.parent / "previews").mkdir()
        write_preview(clips.parent / "previews" / "00001.mp4", frames, 8)
    (sheet, *_), left_out = strips.draw(record, [tmp_path])
    assert left_out == ["Pictures: the files of 3 samples are not in the run's folder."]
    pixels = np.asarray(sheet.image)
    for line, green in ((0, 0), (1, 90)):
        for column in range(5):
            spot = pixels[16 + 42 + line * 136 + 64, 16 + 150 + column * 132 + 64]
            assert spot.tolist() == [40 * column, green, 0]
    write_report(record, tmp_path, formats=["html"])
    reader = read_page(tmp_path / "report" / "report.html")
    assert reader.tags.count("video") == 2
    assert sum(link.startswith("data:video/mp4;base64,") for link in reader.fetched) == 2


def test_links_that_lead_out_of_a_run_are_not_followed(tmp_path: Path) -> None:
    own, other = tmp_path / "run" / "cases", tmp_path / "other"
    (other / "previews").mkdir(parents=True)
    (other / "samples").mkdir()
    (other / "previews" / "00000.mp4").write_bytes(b"secret")
    Image.new("RGB", (8, 8)).save(other / "samples" / "00000.png")
    (other / "manifest.jsonl").write_text('{"ids": [0], "prompts": ["secret"]}\n')
    linked, whole = own / "a-01234567", own / "b-76543210"
    for folder, name in (
        ("previews", "00000.mp4"),
        ("samples", "00000.png"),
        (".", "manifest.jsonl"),
    ):
        (linked / folder).mkdir(parents=True, exist_ok=True)
        (linked / folder / name).symlink_to(other / folder / name)
    whole.symlink_to(other)
    samples = Samples([tmp_path / "run"])
    for row in (
        {"hash": "0123456789"},
        {"hash": "7654321098"},
        {"folder": "cases/a-01234567"},
        {"folder": "cases/b-76543210"},
    ):
        assert samples.preview(row, 0) is None
        assert samples.picture(row, 0) is None
    assert samples.prompts == {}
    within = Samples([tmp_path / "run", other])  # the other one is given too
    assert within.preview({"hash": "7654321098"}, 0) == b"secret"
    assert within.picture({"hash": "0123456789"}, 0) is not None
    assert within.prompts == {0: "secret"}


def test_page_needs_nothing_else(read_page: Any, run: Any) -> None:
    record, folder, _ = run
    reader = read_page(folder / "report" / "report.html")
    assert reader.fetched and all(
        link.startswith("data:image/png;base64,") for link in reader.fetched
    )
    text = (folder / "report" / "report.html").read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//|url\(|@import", text)
    assert text.count("<script") == 1
    for part in ("Table", "Plots", "Samples", "How it was measured", "prefers-color-scheme"):
        assert part in text
    for row_ in table_of(record).rows:
        assert all(cell.text.split(" [")[0].split(" (")[0] in reader.text for cell in row_.cells)
    assert record["command"] in reader.text and "a processor" in reader.text
    assert reader.text.count("64 samples are few") == 1
    with Image.open(folder / "report" / "cost.png") as opened:
        assert f' width="{round(0.8 * opened.width)}" src="data' in text


def test_every_text_is_escaped(
    brief_record: Any, make_run: Any, read_page: Any, evil: str, tmp_path: Path
) -> None:
    record = brief_record()
    record["command"] = record["env"]["device"] = record["task"]["prompts"]["source"] = evil
    record["warnings"] = [evil]
    record["metrics"]["fid_lite"]["title"] = evil
    record["rows"][1]["name"] = evil
    record["task"]["model"] = evil
    write_report(record, make_run(tmp_path, record), formats=["html", "md"])
    text = (tmp_path / "report" / "report.html").read_text()
    assert text.count("<script") == 1 and "alert(&#34;x&#34;)" in text
    assert 'alert("x")' in read_page(tmp_path / "report" / "report.html").text
    plain = (tmp_path / "report" / "report.md").read_text()
    assert "<script" not in plain and r"a \| red \*circle\*" in plain


def test_prompts_stand_under_the_samples(read_page: Any, evil: str, run: Any) -> None:
    _, folder, _ = run
    assert (
        f"sample 1, worst of taylorseer: {evil}, 1" in read_page(folder / "report/report.html").text
    )


def test_same_record_gives_the_same_bytes(brief_record: Any, make_run: Any, tmp_path: Path) -> None:
    record = brief_record()
    files = write_report(record, make_run(tmp_path / "run", record))
    again = write_report(copy.deepcopy(record), tmp_path / "run", tmp_path)
    assert {"report.md", "report.html", "table.csv", "timeline.svg"} <= {f.name for f in files}
    assert [file.name for file in again] == [file.name for file in files]
    for one, other in zip(files, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_report_without_samples_says_so(brief_record: Any, tmp_path: Path) -> None:
    record = brief_record()
    for this in record["rows"]:
        this |= {"quality": {}, "timeline": None, "latent_error": None, "site_error": None}
    write_report(record, tmp_path, formats=["md"])
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Pictures: the files of 4 samples are not in the run's folder." in text
    assert not list(tmp_path.glob("report/samples-*"))


def test_only_what_was_asked_for_is_written(make_record: Any, tmp_path: Path) -> None:
    files = write_report(make_record(), tmp_path, formats=["csv"])
    assert (
        files == [tmp_path / "report" / "table.csv"] and len(list(files[0].parent.iterdir())) == 1
    )
    with pytest.raises(ValueError, match=r"formats=\['pdf'\]: must be of md, html, csv"):
        write_report(make_record(), tmp_path, formats=["pdf"])


def test_several_runs_share_a_plot_only_if_they_share_a_task(
    make_record: Any, renamed: Any, tmp_path: Path
) -> None:
    first = make_record()
    first["rows"] = first["rows"][:2]
    second = renamed(make_record(), "interval", "other")
    for record in (first, second):
        for row_ in record["rows"]:
            row_ |= {"site_error": None, "timeline": None, "latent_error": None, "samples": None}
            row_ |= {"flops": None, "held_bytes": 0}
            row_["fidelity"] = {}
            row_["quality"] = {"fid_lite": row_["quality"]["fid_lite"]}
        record["timing"] = {}
    names = {
        f.name for f in write_reports([(first, tmp_path), (second, tmp_path)], tmp_path / "one")
    }
    assert {"joint-pareto-fid_lite.png", "1-table.csv", "2-table.csv"} <= names
    apart = second | {"task": second["task"] | {"model": "other"}}
    files = write_reports([(first, tmp_path), (apart, tmp_path)], tmp_path / "two", ["md"])
    assert not [file for file in files if file.name.startswith("joint")]
    text = (tmp_path / "two" / "report.md").read_text()
    assert "No plot of all runs together: they differ in model." in text
    assert text.count("| Config |") == 2


def make_document(folder: Path, record: dict[str, Any]) -> tuple[Path, Path]:
    (folder / "speed.json").write_text(json.dumps(record))
    file = folder / "README.md"
    file.write_text(
        "# Title\n\n<!-- diffcache.eval: speed columns=evaluations,psnr_db -->\nold\n"
        "<!-- /diffcache.eval -->\n\nMore.\n"
    )
    return file, folder / "speed.json"


def test_document_is_filled_and_a_typed_change_is_found(make_record: Any, tmp_path: Path) -> None:
    file, record = make_document(tmp_path, make_record())
    assert docs.update(file, [record], check=True) is True and "old" in file.read_text()
    assert docs.update(file, [record]) is True
    text = file.read_text()
    assert text.startswith("# Title\n\n<!-- diffcache") and text.endswith("-->\n\nMore.\n")
    assert "| Config | Evaluations | PSNR (dB) ↑ [95 %] |" in text
    assert "\nold\n" not in text and "38.5 [38.1, 38.9]" in text and "a processor" in text
    assert docs.update(file, [record], check=True) is False
    assert main(["--docs", str(file), str(record), "--check"]) == 0
    file.write_text(text.replace("38.5 [38.1", "48.5 [38.1"))
    assert main(["--docs", str(file), str(record), "--check"]) == 1
    assert "48.5" in file.read_text()
    assert main(["--docs", str(file), str(record)]) == 0
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- diffcache.eval: speed -->\n", "has no <!-- /diffcache.eval -->"),
        ("<!-- diffcache.eval: speed columns=x -->\n", r"columns=\['x'\]"),
    ],
)
def test_wrong_marks_are_named(make_record: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        docs.filled(text, {"speed": make_record()}, "doc.md")


def test_command_line(
    make_record: Any, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, _ = run
    assert main([str(folder), "--format", "csv", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "table.csv")
    assert (
        main([str(folder), str(folder), "--join", "--format", "csv", "--out", str(tmp_path)]) == 0
    )
    assert main([str(tmp_path / "none")]) == 2
    assert "no such record" in capsys.readouterr().err
    assert main([str(folder), str(folder)]) == 2
    assert "--out DIR" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text(json.dumps(make_record(model="other")))
    assert main([str(folder), str(other), "--join", "--out", str(tmp_path)]) == 2
    assert "different tasks" in capsys.readouterr().err


ROOT = Path(__file__).parents[2]


def test_the_table_of_choosing_is_that_of_its_record() -> None:
    record = ROOT / "assets/bench/eval-shapes-flux.json"
    assert not update(ROOT / "docs/choosing.md", [record], check=True)
