"""The page needs nothing else, escapes every text, and is the same every time."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from diffcache.eval.report.table import table_of
from diffcache.eval.report.write import write_report, write_reports


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
