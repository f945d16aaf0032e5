"""Reports of records: tables, plots, sheets of samples and the page."""

import copy
import csv
import io
import json
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
from diffcache.eval.report import palette, plots, strips, words
from diffcache.eval.report.__main__ import main
from diffcache.eval.report.record_files import Value, ordered
from diffcache.eval.report.strips import Samples
from diffcache.eval.report.table import markdown, table_of, terminal_table, to_csv
from diffcache.eval.report.write import write_report
from tests.eval_report.made import (
    EVIL,
    brief_record,
    cells,
    interval,
    make_record,
    make_run,
    picture,
    pixels_of,
    read_page,
)


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
def test_better_means_that_intervals_do_not_overlap(one: Any, other: Any, direction: Any, outcome: Any) -> None:
    assert words.compare(one, other, direction) == outcome


def test_summary_says_whether_a_cache_beats_fewer_steps() -> None:
    said = "\n".join(words.summary(make_record()))
    assert "64 pictures of sticker-flux at 12 steps." in said
    assert "taylorseer against uncached, 3 steps: better in FID-lite, PSNR" in said
    assert "first-block against uncached, 4 steps: worse in PSNR" in said
    assert "taylorseer: 3 evaluations a sample, FLOPs ratio 4, 4 times as fast" in said


def test_numbers_are_those_of_the_record() -> None:
    record = make_record()
    for row_ in record["rows"]:
        for key in ("fid_lite", "clip_score"):
            text = cells(record, key)[row_["name"]].text
            found = [float(n) for n in re.findall(r"-?\d+\.\d+", text)]
            wanted = [row_["quality"][key][part] for part in ("value", "low", "high")]
            assert found == pytest.approx(wanted, abs=0.5 * 10 ** -(2 if key == "fid_lite" else 3) + 1e-9)
    assert cells(record, "seconds")["taylorseer"].text == "0.30 (0.29, 0.33)"
    assert cells(record, "held_bytes")["interval"].text == "352 KiB"


def test_best_is_bold_and_never_the_uncached_row() -> None:
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


def test_dagger_stands_where_the_interval_of_the_change_holds_zero() -> None:
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


def test_reference_has_a_dash_and_what_was_not_measured_says_so() -> None:
    record = make_record()
    record["rows"][2]["fidelity"]["ssim"] = {"value": None}
    del record["timing"]["rows"]["interval"]
    assert cells(record, "psnr_db")["uncached"].text == "—"
    assert cells(record, "fid_lite_change")["uncached"].text == "—"
    assert cells(record, "ssim")["first-block"].text == "n/a"
    assert cells(record, "seconds")["interval"].text == "n/a"


def test_columns_follow_the_record() -> None:
    record = make_record()
    keys = [column.key for column in table_of(record).columns]
    assert keys == [
        "evaluations", "flops_ratio", "seconds", "ratio", "throughput", "peak_bytes", "held_bytes",
        "fid_lite", "fid_lite_change", "fid_lite_to_uncached", "psnr_db", "ssim", "lpips_lite", "clip_score", "kid_lite",
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
    chosen = ["ssim", "evaluations"]
    assert [column.key for column in table_of(make_record(), chosen).columns] == chosen


def test_a_footnote_says_which_interval_is_which() -> None:
    record = make_record()
    assert "[95 %]: bootstrap interval over the samples." in table_of(record).notes
    right = torch.arange(64) < 50
    for row_ in record["rows"]:
        row_["quality"]["clip_score"] = share_interval(right).to_dict()
    only = ("psnr_db", "clip_score", "fid_lite_change")
    assert table_of(record, only).notes[1] == (
        "[95 %] over the samples: bootstrap interval (PSNR, FID-lite, change); Wilson's "
        "interval of shares (CLIP score)."
    )
    record["rows"][1]["outcomes"] = {"fid_lite": "01"}
    assert "Bonett and Price's interval of paired shares (FID-lite, ch" in table_of(record).notes[1]


def test_footnotes_name_back_ends_and_warnings() -> None:
    notes = "\n".join(table_of(make_record()).notes)
    assert "FID-lite to uncached, LPIPS-lite, KID-lite: lite (sticker-features abababababab)" in notes
    assert "not comparable with published figures" in notes
    assert "Warning: 64 samples are few" in notes
    assert "not finished" not in notes
    assert "not finished" in "\n".join(table_of(make_record() | {"finished": False}).notes)


def test_csv_holds_full_precision() -> None:
    record = make_record()
    record["rows"][1]["fidelity"]["psnr_db"]["value"] = 1 / 3
    record["rows"][2]["fidelity"]["psnr_db"] = 0.0  # a number without an interval
    read = list(csv.DictReader(io.StringIO(to_csv(record))))
    names = [line["name"] for line in read]
    assert names == [row_["name"] for row_ in ordered(record)]
    assert float(read[1]["psnr_db"]) == 1 / 3
    assert read[0]["psnr_db"] == ""
    assert read[names.index(record["rows"][2]["name"])]["psnr_db"] == "0.0"
    assert float(read[1]["psnr_db.p5"]) == 28.5
    assert float(read[1]["kid_lite.spread"]) == 0.0002
    assert float(read[1]["seconds.median"]) == pytest.approx(0.3)
    record["rows"][1]["name"] = "=HYPERLINK(A1)"  # which a spreadsheet would run
    assert "\n'=HYPERLINK(A1)," in to_csv(record)
    assert read[5]["matches"] == "first-block; interval"


def test_markdown_has_as_many_cells_in_every_line() -> None:
    record = make_record()
    record["rows"][1]["name"] = "a|b <script> *c*"
    lines_ = [line for line in markdown(table_of(record)).splitlines() if line.startswith("|")]
    counts = {len(re.findall(r"(?<!\\)\|", line)) for line in lines_}
    assert len(lines_) == 2 + len(record["rows"]) and counts == {len(table_of(record).columns) + 2}
    assert r"a\|b &lt;script> \*c\*" in lines_[3]


@pytest.mark.parametrize("width", [60, 160])
def test_terminal_table_fits_and_leaves_no_number_out(width: int) -> None:
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
        places = [(chance.randint(0, 6), chance.randint(0, 6)) for _ in range(chance.randint(1, 14))]
        found = plots.front(places, upward)
        unbeaten = {
            (x, y)
            for x, y in places
            if not any(u >= x and sign * v >= sign * y and (u, v) != (x, y) for u, v in places)
        }
        assert [places[i] for i in found] == sorted(unbeaten)
    assert plots.front([], upward) == []


def test_every_plot_is_drawn(run: Any) -> None:
    _, folder, files = run
    names = {file.name for file in files}
    stems = [
        "pareto-fid_lite_change",
        "pareto-lpips_lite",
        "pareto-psnr_db",
        "pareto-clip_score",
        "timeline",
        "latent-error",
        "cost",
    ]
    for stem in stems:
        assert {f"{stem}.png", f"{stem}.svg"} <= names
        with Image.open(folder / "report" / f"{stem}.png") as opened:
            edge = np.asarray(opened.convert("L"))
        assert len(np.unique(edge)) > 20 and (edge != 255).mean() > 0.02
        # Nothing runs off the figure: its outermost pixels are those of the ground.
        assert min(edge[0].min(), edge[-1].min(), edge[:, 0].min(), edge[:, -1].min()) == 255


def test_missing_data_is_said_in_words() -> None:
    record = make_record()
    record["timing"] = {}
    for row_ in record["rows"]:
        row_ |= {"timeline": None, "latent_error": None, "flops": None}
        row_ |= {"held_bytes": 0, "flops_ratio": None}
    drawn, left_out = plots.draw(record)
    assert drawn == []
    assert [text.partition(":")[0] for text in left_out] == [
        "Quality against speed",
        "Decisions",
        "Error of the latents",
        "Cost",
    ]


def test_a_metric_in_which_all_rows_are_equal_is_not_plotted() -> None:
    record = make_record()
    for row_ in record["rows"]:
        row_["quality"], row_["fidelity"] = {"fid_lite": row_["quality"]["fid_lite"]}, {}
        row_["quality"]["clip_score"] = {"value": 1.0, "low": 1.0, "high": 1.0, "n": 64}
    drawn, left_out = plots.draw_pareto(record)
    assert "pareto-clip_score" not in {plot.stem for plot in drawn} and drawn
    assert left_out == ["Quality against speed: all rows are equal in CLIP score."]
    record["rows"][1]["quality"]["clip_score"]["low"] = 0.99
    drawn, left_out = plots.draw_pareto(record)
    assert "pareto-clip_score" in {plot.stem for plot in drawn} and not left_out
    for row_ in record["rows"]:  # of somebody else's
        row_["quality"] = {"../own": row_["quality"]["clip_score"]}
    record["metrics"] = {"../own": {"title": "own", "direction": "up"}}
    assert [plot.stem for plot in plots.draw_pareto(record)[0]] == ["pareto----own"]


def test_sheet_shows_the_pixels_and_their_difference(tmp_path: Path) -> None:
    record = make_record()
    record["rows"] = record["rows"][:2]
    make_run(tmp_path, record)
    sheets, left_out = strips.draw(record, [tmp_path])
    assert [sheet.stem for sheet in sheets] == ["samples-worst", "samples-median", "samples-best"]
    assert left_out == []
    shown_pixels = pixels_of(sheets[2])
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


def test_narrow_pictures_leave_room_for_the_words_below(tmp_path: Path) -> None:
    record = make_record()
    record["rows"] = record["rows"][:2]
    for file in make_run(tmp_path, record, "two\nlines").glob("cases/*/samples/*.png"):
        Image.open(file).resize((8, 128)).save(file)
    sheet = strips.draw(record, [tmp_path])[0][0]
    assert pixels_of(sheet).shape[1] == 2 * (2 * (192 + 12) - 12 + 2 * 16)
    assert sheet.lines[0].endswith(": two lines, 1")


def test_names_that_begin_with_an_underscore_are_in_the_legend() -> None:
    figure = plots._draw_growth({"_mine": [0.1, 0.2]}, {"_mine": palette.Style("#000000", "o", "-")})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_mine"]


def test_a_timeline_of_many_steps_shows_its_cells() -> None:
    record = make_record()
    record["rows"][1]["timeline"] = [{"step": step, "computed": 1.0} for step in range(1000)]
    (shown,) = (plot for plot in plots.draw(record)[0] if plot.stem == "timeline")
    red, _, blue = pixels_of(shown)[..., :3].astype(int).transpose(2, 0, 1)
    assert ((blue - red) > 100).mean() > 0.1


def test_methods_take_turns_in_the_choice_of_samples() -> None:
    methods = [
        {"name": "a", "samples": {"worst": [7, 2, 9]}},
        {"name": "b", "samples": {"worst": [7, 5]}},
        {"name": "c", "samples": None},
    ]
    assert strips.picks(methods, "worst", 3) == [(7, "a"), (2, "a"), (5, "b")]
    assert strips.picks(methods, "best", 3) == []


def test_damaged_and_foreign_files_are_not_shown(tmp_path: Path) -> None:
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


def test_films_have_contact_sheets_and_previews(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from diffcache.eval.samples.clips import write_clip, write_preview

    record = brief_record()
    record["task"]["kind"] = "films"
    record["rows"] = record["rows"][:2]
    for row_ in record["rows"]:
        row_ |= {"timeline": None, "latent_error": None, "quality": {}}
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
    pixels = pixels_of(sheet)
    for line, green in ((0, 0), (1, 90)):
        for column in range(5):
            spot = pixels[16 + 42 + line * 136 + 64, 16 + 150 + column * 132 + 64]
            assert spot.tolist() == [40 * column, green, 0]
    write_report(record, tmp_path, formats=["html"])
    reader = read_page(tmp_path / "report" / "report.html")
    assert reader.tags.count("video") == 2
    assert sum(link.startswith("data:video/mp4;base64,") for link in reader.fetched) == 2
    labels = []
    for size in (0.05, 0.08):
        record["rows"][1]["name"] = f"first-block:threshold={size}"
        labels.append(pixels_of(strips.draw(record, [tmp_path])[0][0])[60:, :160])
    assert not np.array_equal(*labels)  # settings are not cut off


def test_links_that_lead_out_of_a_run_are_not_followed(tmp_path: Path) -> None:
    own, other = tmp_path / "run" / "cases", tmp_path / "other"
    (other / "previews").mkdir(parents=True)
    (other / "samples").mkdir()
    (other / "previews" / "00000.mp4").write_bytes(b"secret")
    Image.new("RGB", (8, 8)).save(other / "samples" / "00000.png")
    (other / "manifest.jsonl").write_text('{"ids": [0], "prompts": ["secret"]}\n')
    linked, whole = own / "a-01234567", own / "b-76543210"
    for folder, name in (("previews", "00000.mp4"), ("samples", "00000.png"), (".", "manifest.jsonl")):
        (linked / folder).mkdir(parents=True, exist_ok=True)
        (linked / folder / name).symlink_to(other / folder / name)
    whole.symlink_to(other)
    samples = Samples([tmp_path / "run"])
    for this in (
        {"hash": "0123456789"},
        {"hash": "7654321098"},
        {"folder": "cases/a-01234567"},
        {"folder": "cases/b-76543210"},
    ):
        assert samples.preview(this, 0) is None
        assert samples.picture(this, 0) is None
    assert samples.prompts == {}
    within = Samples([tmp_path / "run", other])  # the other one is given too
    assert within.preview({"hash": "7654321098"}, 0) == b"secret"
    assert within.picture({"hash": "0123456789"}, 0) is not None
    assert within.prompts == {0: "secret"}


def test_page_needs_nothing_else(run: Any) -> None:
    record, folder, _ = run
    reader = read_page(folder / "report" / "report.html")
    assert reader.fetched and all(link.startswith("data:image/png;base64,") for link in reader.fetched)
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


def test_every_text_is_escaped_and_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    record = brief_record()
    record["command"] = record["env"]["device"] = record["task"]["prompts"]["source"] = EVIL
    record["warnings"] = [EVIL]
    record["metrics"]["fid_lite"]["title"] = EVIL
    record["rows"][1]["name"] = EVIL
    record["task"]["model"] = EVIL
    files = write_report(copy.deepcopy(record), make_run(tmp_path, record))
    text = (tmp_path / "report" / "report.html").read_text()
    assert text.count("<script") == 1 and "alert(&#34;x&#34;)" in text
    assert 'alert("x")' in read_page(tmp_path / "report" / "report.html").text
    plain = (tmp_path / "report" / "report.md").read_text()
    assert "<script" not in plain and r"a \| red \*circle\*" in plain
    again = write_report(record, tmp_path, tmp_path / "again")
    assert {"report.md", "report.html", "table.csv", "timeline.svg"} <= {f.name for f in files}
    assert [file.name for file in again] == [file.name for file in files]
    for one, other in zip(files, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_only_what_was_asked_for_is_written(tmp_path: Path) -> None:
    files = write_report(make_record(), tmp_path, formats=["csv"])
    assert files == [tmp_path / "report" / "table.csv"] and len(list(files[0].parent.iterdir())) == 1
    record = make_record()
    record["rows"] = record["rows"][:1]
    for shown in (True, False):  # stand-ins are explained where there are some
        page = next(f for f in write_report(record, tmp_path, formats=["md"]) if f.suffix == ".md")
        assert ("stand-ins" in page.read_text()) is (words.LITE in page.read_text()) is shown
        record["metrics"] = {}


def test_command_line(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder, _ = run
    assert main([str(folder), "--format", "csv", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "table.csv")
    other = tmp_path / "other" / "record.json"
    other.parent.mkdir()
    other.write_text(json.dumps(make_record(model="other")))
    assert main([str(folder), str(other), "--format", "csv"]) == 0
    wrote = [str(place / "report" / "table.csv") for place in (folder, other.parent)]
    assert capsys.readouterr().out.split() == wrote
    assert main([str(tmp_path / "none")]) == 2
    assert "no such record" in capsys.readouterr().err
    assert main([str(folder), str(folder), "--out", str(tmp_path)]) == 2
    assert "files of 2 runs have the same names" in capsys.readouterr().err
