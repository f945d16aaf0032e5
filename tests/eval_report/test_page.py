"""The page of a report, and its command."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from diffcache.eval.report.__main__ import main
from diffcache.eval.report.table import table_of
from diffcache.eval.report.write import write_report
from tests.eval_report.made import EVIL, brief_record, make_record, make_run, read_page


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


def test_every_text_is_escaped(tmp_path: Path) -> None:
    record = brief_record()
    record["command"] = record["env"]["device"] = record["task"]["prompts"]["source"] = EVIL
    record["warnings"] = [EVIL]
    record["metrics"]["fid_lite"]["title"] = EVIL
    record["rows"][1]["name"] = EVIL
    record["task"]["model"] = EVIL
    write_report(record, make_run(tmp_path, record), formats=["html", "md"])
    text = (tmp_path / "report" / "report.html").read_text()
    assert text.count("<script") == 1 and "alert(&#34;x&#34;)" in text
    assert 'alert("x")' in read_page(tmp_path / "report" / "report.html").text
    plain = (tmp_path / "report" / "report.md").read_text()
    assert "<script" not in plain and r"a \| red \*circle\*" in plain


def test_prompts_stand_under_the_samples(run: Any) -> None:
    _, folder, _ = run
    assert f"sample 1, worst of taylorseer: {EVIL}, 1" in read_page(folder / "report/report.html").text


def test_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    record = brief_record()
    files = write_report(record, make_run(tmp_path / "run", record))
    again = write_report(copy.deepcopy(record), tmp_path / "run", tmp_path)
    assert {"report.md", "report.html", "table.csv", "timeline.svg"} <= {f.name for f in files}
    assert [file.name for file in again] == [file.name for file in files]
    for one, other in zip(files, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_report_without_samples_says_so(tmp_path: Path) -> None:
    record = brief_record()
    for this in record["rows"]:
        this |= {"quality": {}, "timeline": None, "latent_error": None}
    write_report(record, tmp_path, formats=["md"])
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Pictures: the files of 4 samples are not in the run's folder." in text
    assert not list(tmp_path.glob("report/samples-*"))


def test_only_what_was_asked_for_is_written(tmp_path: Path) -> None:
    files = write_report(make_record(), tmp_path, formats=["csv"])
    assert files == [tmp_path / "report" / "table.csv"] and len(list(files[0].parent.iterdir())) == 1
    with pytest.raises(ValueError, match=r"formats=\['pdf'\]: must be of md, html, csv"):
        write_report(make_record(), tmp_path, formats=["pdf"])


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
