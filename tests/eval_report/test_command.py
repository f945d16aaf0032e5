"""Regions of documents, and the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from diffcache.eval.report import docs
from diffcache.eval.report.__main__ import main


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
