"""Films named and laid out as VBench wants them, and its list of prompts."""

import json
from pathlib import Path

import pytest
import torch

from diffcache.eval.clips import read_clip, read_fps
from diffcache.eval.vbench import layout, sampling, suite


def film(seed: int = 0, frames: int = 3, side: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, 3, side, side), generator=generator, dtype=torch.uint8)


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
    entries = layout.full_info(folder, prompts, ["color"])
    assert len(entries) == 85
    assert list(entries[9]) == ["prompt_en", "dimension", "video_list"]
    assert entries[9]["video_list"] == [str(folder / f"color 9.-{i}.mp4") for i in range(1, 5)]


def test_nothing_but_films_may_lie_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        layout.check_folder(tmp_path / "films")
    folder = tmp_path / "films"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no film"):
        layout.check_folder(folder)
    (folder / "a-0.mp4").touch()
    assert [file.name for file in layout.check_folder(folder)] == ["a-0.mp4"]
    (folder / "manifest.jsonl").touch()
    with pytest.raises(ValueError, match="nothing but .mp4 films, but has 'manifest.jsonl'"):
        layout.check_folder(folder)


def test_films_are_written_for_vbench_and_come_back_frame_by_frame(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    for index in range(2):
        name = layout.film_name("A house, 100% old.", index)
        layout.write_film(folder, name, film(index))
        layout.record_film(folder, name, seed=40 + index)
    assert [file.name for file in layout.check_folder(folder)] == [
        "A house, 100% old.-0.mp4",
        "A house, 100% old.-1.mp4",
    ]
    assert torch.equal(read_clip(folder / "A house, 100% old.-1.mp4"), film(1))
    assert read_fps(folder / "A house, 100% old.-1.mp4") == 8
    lines = (tmp_path / "films.manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [40, 41]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["films", "films.manifest.jsonl"]


def test_the_suite_is_drawn_once_with_a_seed_for_each_film(tmp_path: Path, info: Path) -> None:
    prompts = layout.read_info(info)[-12:]
    seen: list[tuple[str, int]] = []

    def draw(prompt: str, seed: int) -> torch.Tensor:
        if len(seen) == 7:
            raise KeyboardInterrupt
        seen.append((prompt, seed))
        return film(seed)

    folder = tmp_path / "films"
    with pytest.raises(KeyboardInterrupt):
        sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=100)
    assert len(layout.check_folder(folder)) == 7
    # Killed while a line was written: the next one must not be lost with it.
    with layout.manifest(folder).open("a") as manifest:
        manifest.write('{"file": "appearance_st')
    seen.append(("", 0))
    assert sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=100) == 53
    del seen[7]
    assert [seed for _, seed in seen] == list(range(100, 160))
    assert seen[5] == ("appearance_style 79.", 105)
    assert layout.missing(folder, prompts, ["appearance_style"]) == {}
    assert torch.equal(read_clip(folder / "appearance_style 79.-1.mp4"), film(106))
    facts = sampling.read_manifest(folder)
    assert len(facts) == 60
    assert facts["appearance_style 79.-1.mp4"] == {
        "prompt": "appearance_style 79.",
        "seed": 106,
        "fps": 8.0,
        "frames": 3,
    }
    assert sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=100) == 0
    with pytest.raises(ValueError, match="appearance_style 78.-0.mp4 was drawn with seed 100, not"):
        sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=7)
    with pytest.raises(ValueError, match="drawn with fps 8.0, not 24"):
        sampling.draw_suite(folder, prompts, draw, ["appearance_style"], fps=24, seed=100)
    layout.manifest(folder).unlink()
    with pytest.raises(ValueError, match="not in the manifest"):
        sampling.draw_suite(folder, prompts, draw, ["appearance_style"], seed=100)


def test_films_of_any_prompts_have_them_in_a_json(tmp_path: Path) -> None:
    films = [("what / why?", film(0)), ("x" * 500, film(1))]
    path = layout.write_custom(tmp_path / "mine", films, fps=12)
    assert path == tmp_path / "prompts" / "mine.json"
    prompts = json.loads(path.read_text())
    assert prompts == {"00000.mp4": "what / why?", "00001.mp4": "x" * 500}
    assert torch.equal(read_clip(tmp_path / "mine" / "00001.mp4"), film(1))
    assert read_fps(tmp_path / "mine" / "00000.mp4") == 12


@pytest.mark.parametrize("mark", [*'/\\:*?"<>|', "\n", "\0"])
def test_a_prompt_that_is_no_file_name_is_an_error(mark: str) -> None:
    with pytest.raises(ValueError, match=r"prompt 'a.+b' cannot be a file name.*write_custom"):
        layout.film_name(f"a{mark}b", 0)


def test_names_are_limited_in_bytes(tmp_path: Path) -> None:
    assert layout.film_name("x" * 210, 24) == "x" * 210 + "-24.mp4"
    assert len(layout.film_name("x" * 249, 0)) == 255
    layout.write_film(tmp_path / "films", layout.film_name("x" * 249, 0), film())
    for prompt, size in (("x" * 250, 256), ("\u00e9" * 125, 256)):
        with pytest.raises(ValueError, match=f"prompt '{prompt[0]}+' makes a file name of {size}"):
            layout.film_name(prompt, 0)
    with pytest.raises(ValueError, match="no text"):
        layout.film_name(" ", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("{}", "must be a list of entries"),
        ('[{"prompt": "a"}]', "entry 0 needs prompt_en"),
        ('[{"prompt_en": "a", "dimension": ["sound"]}]', r"unknown dimensions \['sound'\]"),
        ('[{"prompt_en": "a/b", "dimension": ["scene"]}]', "'a/b' cannot be a file name"),
    ],
)
def test_what_is_no_list_of_prompts_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "info.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        layout.read_info(tmp_path / "info.json")


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
    with pytest.raises(FileNotFoundError, match="no file elsewhere.json"):
        layout.find_info("elsewhere.json")
