"""The command line on folders of films, with VBench and without."""

import json
from pathlib import Path

import pytest

from diffcache.eval.vbench.__main__ import main


def some_films(folder: Path, count: int = 2) -> Path:
    folder.mkdir()
    for index in range(count):
        (folder / f"a cat-{index}.mp4").write_bytes(b"film")
    return folder


def test_the_command_runs_vbench(
    tmp_path: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    films = some_films(tmp_path / "films")
    command = [str(films), "--backend", "official", "--device", "cpu", "--json", "-"]
    assert main([*command, "--dimensions", "temporal_flickering"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["raw"], report["mode"]) == ({"temporal_flickering": 0.5}, "custom_input")
    # The three scores are defined on the prompts of the suite only.
    assert (report["quality"], report["semantic"], report["total"]) == (None, None, None)
    assert (tmp_path / "films-vbench" / "temporal_flickering_eval_results.json").is_file()
    prompts = tmp_path / "prompts.json"
    for text in ("{", "[]", '{"a cat-0.mp4": 1}'):
        prompts.write_text(text)
        assert main([*command, "--prompts", str(prompts)]) == 2
        assert f"error: {prompts} " in capsys.readouterr().err
    assert main(command) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: VBench needs ")
    assert "RAFT" not in said and "raft-things.pth" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a folder of films, or --score"),
        (["x", "--score", "y"], "one of them"),
        (["nowhere"], "no folder nowhere"),
        (["x", "--device", "cpu"], "--device has no effect with --backend own"),
        (["x", "--fps", "0"], "--fps 0.0: must be frames per second, above 0"),
        (["x", "--backend", "official", "--fps", "8"], "--fps has no effect"),
        (["--score", "nowhere"], "no VBench result in nowhere"),
        (["--score", "x", "--info"], "--info has no effect with --score"),
        (["x", "--info", "nowhere.json"], "no file nowhere.json"),
        (["x", "--backend", "unknown"], "invalid choice: 'unknown'"),
    ],
)
def test_a_wrong_request_is_one_clear_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "error: " in shown.err
    assert shown.out == ""
