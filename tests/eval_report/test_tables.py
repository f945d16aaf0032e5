"""Tables of records: their rows, numbers, footnotes and forms."""

import csv
import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console

from diffcache.eval.metrics.intervals import share_interval
from diffcache.eval.report import words
from diffcache.eval.report.columns import Column, bytes_text, decimals, shown
from diffcache.eval.report.records import Value, checked, ordered
from diffcache.eval.report.table import markdown, table_of, terminal_table, to_csv
from tests.eval_report.made import cells, interval, make_record


def test_wrong_records_are_refused() -> None:
    record = make_record()
    record["rows"][2]["name"] = "taylorseer"
    with pytest.raises(ValueError, match="names that differ"):
        checked(record)
    for timing in (7, {"rows": [None]}, {"rows": {"interval": 7}}, {"rows": {"interval": {"ratio": -1}}}):
        with pytest.raises(ValueError, match="timing.rows: .* must be an object"):
            checked(make_record() | {"timing": timing})
    record = make_record()
    record["rows"][0]["fidelity"] = [None]
    with pytest.raises(ValueError, match=r"fidelity: \[None\] must be an object"):
        checked(record)


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


def test_rows_stand_under_what_they_are_to_be_compared_with() -> None:
    names = [row["name"] for row in ordered(make_record())]
    assert names == ["uncached", "taylorseer", "uncached, 3 steps", "first-block", "interval", "uncached, 4 steps"]
    labels = [row.label for row in table_of(make_record()).rows]
    assert labels[2] == "↳ uncached, 3 steps"
    assert labels[5] == "↳ uncached, 4 steps (for first-block, interval)"


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


def test_nothing_is_bold_without_a_rival() -> None:
    record = make_record()
    record["rows"] = record["rows"][:2]
    assert not any(cell.bold for row_ in table_of(record).rows for cell in row_.cells)


def test_nothing_is_bold_where_all_are_equal() -> None:
    record = make_record()
    for row_ in record["rows"]:
        row_["quality"]["clip_score"] = interval(1.0, 0.0)
    assert not any(cell.bold for cell in cells(record, "clip_score").values())


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


def test_chosen_columns_come_in_their_order() -> None:
    table = table_of(make_record(), ["ssim", "evaluations"])
    assert [column.key for column in table.columns] == ["ssim", "evaluations"]


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
        "0 B",
        "512 B",
        "1 KiB",
        "1.5 KiB",
        "352 KiB",
        "5 GiB",
    ]


def test_csv_holds_full_precision() -> None:
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


def test_markdown_has_as_many_cells_in_every_line() -> None:
    record = make_record()
    record["rows"][1]["name"] = "a|b <script> *c*"
    lines_ = [line for line in markdown(table_of(record)).splitlines() if line.startswith("|")]
    counts = {len(re.findall(r"(?<!\\)\|", line)) for line in lines_}
    assert len(lines_) == 2 + len(record["rows"]) and counts == {len(table_of(record).columns) + 2}
    assert r"a\|b &lt;script> \*c\*" in lines_[3]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_terminal_table_fits_and_leaves_no_number_out(width: int) -> None:
    record = make_record()
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(terminal_table(record))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    for row_ in table_of(record).rows:
        assert all(cell.text in text for cell in row_.cells)
