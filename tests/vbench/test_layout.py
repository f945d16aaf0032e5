"""Films named and laid out as VBench wants them, and its list of prompts."""

from pathlib import Path

import pytest

from diffcache.eval.vbench import layout, suite


def test_the_suite_has_as_many_films_as_vbench_counts(info: Path) -> None:
    prompts = layout.read_info(info)
    assert len(prompts) == 946
    assert len({prompt.text for prompt in prompts}) == 944
    for name, dimension in suite.DIMENSIONS.items():
        names = layout.expected(prompts, [name])
        assert len(names) == dimension.prompts * (25 if name == "temporal_flickering" else 5)
    everything = layout.expected(prompts)
    # 4720 of five a prompt (VBench's own count), and twenty more for the 75 of flickering.
    assert len(everything) == len(set(everything)) == 4720 + 20 * 75
    assert "subject_consistency 0.-4.mp4" in everything


def test_missing_films_are_counted_and_a_part_is_refused(tmp_path: Path, info: Path) -> None:
    prompts = layout.read_info(info)
    folder = tmp_path / "films"
    folder.mkdir()
    for name in layout.expected(prompts, ["scene", "color"]):
        (folder / name).touch()
    layout.require_complete(folder, prompts, ["scene", "color"])
    (folder / "scene 3.-4.mp4").touch()
    (folder / "background_consistency 3.-4.mp4").unlink()
    (folder / "color 9.-0.mp4").unlink()
    lacking = layout.missing(folder, prompts, ["scene", "color"])
    assert lacking == {
        "color": ["color 9.-0.mp4"],
        "scene": ["background_consistency 3.-4.mp4"],
    }
    with pytest.raises(ValueError, match=r"not VBench: color 1, scene 1; the first is 'color 9"):
        layout.require_complete(folder, prompts, ["scene", "color"])
    with pytest.raises(ValueError, match="85 of the 86 prompts of scene"):
        layout.require_complete(
            folder, [p for p in prompts if p.text != "background_consistency 8."], ["scene"]
        )


def test_nothing_but_films_may_lie_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        layout.check_folder(tmp_path / "films")
    folder = tmp_path / "films"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no film"):
        layout.check_folder(folder)
    (folder / "a-0.mp4").touch()
    assert [file.name for file in layout.check_folder(folder)] == ["a-0.mp4"]
    for name in ("manifest.jsonl", "a-0.preview.mp4"):
        (folder / name).touch()
        with pytest.raises(ValueError, match=f"nothing but .mp4 films, but has '{name}'"):
            layout.check_folder(folder)
        (folder / name).unlink()


@pytest.mark.parametrize("mark", [*'/\\:*?"<>|', "\n", "\0"])
def test_a_prompt_that_is_no_file_name_is_an_error(mark: str) -> None:
    with pytest.raises(
        ValueError, match=r"prompt 'a.+b' cannot be a file name.*take it out of the list"
    ):
        layout.film_name(f"a{mark}b", 0)


def test_names_are_limited_in_bytes() -> None:
    assert layout.film_name("x" * 210, 24) == "x" * 210 + "-24.mp4"
    assert len(layout.film_name("x" * 249, 0)) == 255


def test_the_list_of_prompts_is_found_in_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(FileNotFoundError, match=r"VBench_full_info.json.*github.com/Vchitect"):
            layout.find_info()
    (tmp_path / "vbench").mkdir()
    (tmp_path / "vbench" / "__init__.py").write_text("raise ImportError('not to be imported')")
    (tmp_path / "vbench" / layout.INFO).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert layout.find_info() == tmp_path / "vbench" / layout.INFO
