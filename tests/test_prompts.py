"""Prompt files of every kind against their contents; every error names the file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from diffcache.eval.samples.prompts import (
    PAIRED,
    SHIPPED,
    Prompts,
    calibration_prompts,
    load_prompts,
)
from diffcache.pipelines.small import scenes

TEXTS = ("a red kite", 'a sign that says "stop", twice', "zwei Hüte")
SHA256 = hashlib.sha256("\n".join(TEXTS).encode()).hexdigest()


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8", newline="")
    return file


FILES = {
    "plain.txt": '# a comment\na red kite\r\n\n  a sign  that says "stop", twice \n# more\nzwei Hüte',
    "marked.txt": '\ufeffa red kite\na sign that says "stop", twice\nzwei Hüte\n',
    "DrawBench.csv": 'Prompts,Category\na red kite,A\n"a sign that says ""stop"", twice",B\n,C\nzwei Hüte,D\n',
    "PartiPrompts.tsv": 'Prompt\tCategory\na red kite\tA\na sign that says "stop", twice\tB\nzwei Hüte\tC\n',
    "sheet.tsv": 'Prompt\tx\na red kite\t1\n"a sign that says ""stop"", twice"\t2\nzwei Hüte\t3\n',
    "captions.json": json.dumps({"images": [], "annotations": [{"caption": t} for t in TEXTS]}),
    "VBench_full_info.json": json.dumps([{"prompt_en": t, "dimension": []} for t in TEXTS]),
    "texts.json": json.dumps(TEXTS),
    "objects.json": json.dumps([{"prompt": t} for t in TEXTS]),
    "lines.jsonl": "\n".join(
        json.dumps(t) for t in (TEXTS[0], {"prompt": TEXTS[1]}, {"caption": TEXTS[2]})
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_give_the_same_prompts(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, name, FILES[name])
    assert load_prompts(file) == Prompts(str(file), TEXTS, SHA256)
    few = load_prompts(str(file), limit=2)
    assert few.texts == TEXTS[:2] and few.sha256 == SHA256  # a limit makes no other list of it


def test_a_column_is_named_behind_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "own.csv", "id,Text,Other\n1,one,two\n2,three,four\n")
    assert load_prompts(f"{file}:text").texts == ("one", "three")
    assert load_prompts(f"{file}:Other").texts == ("two", "four")
    entries = written(tmp_path, "own.json", '[{"words": "five", "prompt": "six"}]')
    assert load_prompts(f"{entries}:words").texts == ("five",)


def test_coco_captions_are_one_a_picture_drawn_at_random(tmp_path: Path) -> None:
    texts = {i: [f"picture {i} said {n}" for n in range(5)] for i in range(40)}
    entries = [
        {"image_id": i, "id": 5 * i + n, "caption": text}
        for i, several in texts.items()
        for n, text in enumerate(several)
    ]
    file = written(tmp_path, "captions_val2014.json", json.dumps({"annotations": entries}))
    found = load_prompts(file)
    pictures = [int(text.split()[1]) for text in found.texts]
    chosen = {text.split()[-1] for text in found.texts}
    assert sorted(pictures) == list(range(40)) and pictures != list(range(40))
    assert chosen == set("01234") and "one caption a picture" in found.rule
    few = load_prompts(file, limit=10)  # a sample of the pictures, that a larger one begins with
    assert few.texts == found.texts[:10] and few.sha256 == found.sha256
    turned = written(tmp_path, "turned.json", json.dumps({"annotations": entries[::-1]}))
    assert load_prompts(turned).texts == found.texts


def test_a_list_begins_again_where_it_ends() -> None:
    found = Prompts("x", ["a", "b", "c"], "")
    assert [found[i] for i in range(7)] == list("abcabca")


@pytest.mark.parametrize(("name", "count"), [("shapes", 64), ("pictures", 100), ("films", 50)])
def test_shipped_lists(name: str, count: int) -> None:
    found = load_prompts(name)
    assert name in SHIPPED and found.source == name
    assert len(found.texts) == len(set(found.texts)) == count
    assert all(text == text.strip() and not text.startswith("#") for text in found.texts)
    assert load_prompts(name, limit=7).texts == found.texts[:7]
    assert load_prompts(name, limit=7).sha256 == found.sha256


def test_held_out_list_is_any_length_and_a_longer_one_begins_with_a_shorter() -> None:
    long, short = load_prompts("shapes-held-out", 150), load_prompts("shapes-held-out", 40)
    assert long.texts[:40] == short.texts and len(set(long.texts)) == 150
    assert long.source == short.source == "shapes-held-out"
    assert all(scenes.held_out(scenes.parse(text)) for text in long.texts)


def test_held_out_scenes_of_one_object_are_all_there_are() -> None:
    found = load_prompts("shapes-one-held-out")
    read = [scenes.parse(text) for text in found.texts]
    assert len({scene.key() for scene in read}) == len(read) == 236
    assert all(len(scene.figures) == 1 and scenes.held_out(scene) for scene in read)
    assert load_prompts("shapes-one-held-out", 9).sha256 == found.sha256


def test_quotation_marks_at_the_start_of_a_tsv_cell_stay(tmp_path: Path) -> None:
    rows = ['"HI" painted on a wall', '"one" beside "two"', "plain"]
    file = written(tmp_path, "quotes.tsv", "Prompt\tn\n" + "".join(f"{row}\t1\n" for row in rows))
    assert load_prompts(file).texts == tuple(rows)


def test_what_is_calibrated_on_is_not_evaluated_on(tmp_path: Path) -> None:
    for name in PAIRED:
        own = calibration_prompts(name)
        assert len(own.texts) >= 32 and len(set(own.texts)) == len(own.texts)
        assert not {text.lower() for text in own.texts} & {
            text.lower() for text in load_prompts(name).texts
        }
    texts = [f"prompt {number}" for number in range(60)]
    file = written(tmp_path, "own.txt", "\n".join(texts))
    one, other = calibration_prompts(str(file)), load_prompts(f"held-out:{file}")
    assert sorted([*one.texts, *other.texts]) == sorted(texts)
    assert 20 <= len(one.texts) <= 40 and one.sha256 != other.sha256
    assert other.source == f"held-out:{file}"
    turned = written(tmp_path, "turned.txt", "\n".join(reversed(texts)))
    assert set(calibration_prompts(str(turned)).texts) == set(one.texts)  # by content, not place
    few = written(tmp_path, "few.csv", f"x,words\n1,{other.texts[0]}\n")
    with pytest.raises(ValueError, match="none of its 1 prompts may be calibrated on.*longer list"):
        calibration_prompts(f"{few}:words")
    only = written(tmp_path, "only.txt", one.texts[0])
    with pytest.raises(ValueError, match=r"only.txt holds no prompt to hold out"):
        load_prompts(f"held-out:{only}")
    with pytest.raises(FileNotFoundError, match="no prompts 'nowhere.txt'"):
        load_prompts("held-out:nowhere.txt")
