"""Offline stages run on a tiny model, write tables that recipes take, and leave the model alone."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from diffcache.errors import TablesError
from diffcache.eval.kv import recipe_words, stages
from diffcache.eval.kv.contexts import RecallSamples, TextSamples, Work, read, seen_by
from diffcache.eval.kv.recall_cost import KVTask, measure
from diffcache.eval.kv.texts import TextModel, read_texts, windows
from diffcache.kv import (
    cache_for,
    compresskv,
    cskv,
    detach,
    double_sparsity,
    duo_attention,
    h2o,
    prefixkv,
    razor_attention,
    snapkv,
)
from diffcache.kv.recipes.merging import lococo as lococo_recipe
from diffcache.kv.recipes.merging import locret as locret_recipe
from tests.kv.eval.small import CONTEXT, FACTS, call, task
from tests.kv.tiny import peaked
from tests.zoo.language import build

SAMPLES = RecallSamples(CONTEXT, FACTS, 4, 2)
DIGEST = "0" * 16


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("tables")
    model = task(folder).load()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    work = Work(model, SAMPLES, lambda *_: None)
    for file in recipe_words.FOLDER.glob("*.safetensors"):  # those that are shipped
        stages.make(file.stem, work, into / file.name, DIGEST, **SHORT.get(file.stem, {}))
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert model.config._attn_implementation == "sdpa"
    return into


def test_recipes_take_what_was_made(made: Path, folder: Path) -> None:
    def table(name: str, setting: str, entry: str = "") -> object:
        return recipe_words.read_table(f"@{made / name}.safetensors{entry}", setting)

    rows = [
        duo_attention(table("duo_attention", "heads"), 8, sinks=2),  # type: ignore[arg-type]
        razor_attention(table("razor_attention", "heads"), 8, least=4),  # type: ignore[arg-type]
        compresskv(
            0.5,
            heads=table("compresskv", "heads"),
            weights=table("compresskv", "weights"),
            least=2,  # type: ignore[arg-type]
        ),
        prefixkv(0.5, shares=table("prefixkv", "shares", "#0.5")),  # type: ignore[arg-type]
        double_sparsity(table("double_sparsity", "channels"), 0.5, recent=4),  # type: ignore[arg-type]
        cskv(table("cskv", "bases", "#8"), recent=4),  # type: ignore[arg-type]
        locret_recipe(table("locret", "heads"), 0.5, stabilizers=4),  # type: ignore[arg-type]
        lococo_recipe(table("lococo", "weights"), 16, recent=4),  # type: ignore[arg-type]
    ]
    model = task(folder).load()
    for row in rows:
        found = measure(model, row, task(folder))
        assert found["slots"] <= CONTEXT, row.name
    assert found["slots"] == 16


SHORT: dict[str, dict[str, Any]] = {
    "duo_attention": {"epochs": 1},
    "lococo": {"steps": 2},
    "locret": {"steps": 2},
    "epicache": {"block": 32},
    "a2ats": {"codes": 8},
    "cskv": {"steps": 2, "ranks": (8,)},
    "prefixkv": {"budgets": (0.5,)},
    "razor_attention": {"period": 8},
}
# Recipe -> settings that have it act on contexts of 48 tokens.
ACTING = {
    "duo_attention": "budget=16,sinks=2",
    "razor_attention": "budget=8,least=4",
    "compresskv": "budget=16,least=2",
    "prefixkv": "budget=0.5",
    "epicache": "budget=16",
    "lococo": "budget=16,recent=1",
    "locret": "budget=16,stabilizers=2",
    "double_sparsity": "budget=16,recent=4,skip=0",
    "a2ats": "budget=16,recent=4",
    "cskv": "recent=4",
    "kv_heads": "",
    "xquant_latent": "bits=4",
}


def test_texts_are_read_from_files_and_folders(reader: Path, tmp_path: Path) -> None:
    lines, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("one text\n\ntwo\n")
    rows.write_text('{"text": "one\\ntext", "more": 1}\n{"text": "two"}\n')
    assert read_texts(lines) == ["one text", "two"]
    assert read_texts(rows) == ["one\ntext", "two"]
    assert read_texts(tmp_path) == ["one text\n\ntwo\n"]
    with pytest.raises(ValueError, match=r"^pydoc_data\.topics, read without --texts: \d+ windows of 48 tokens, and"):
        windows(TextModel(str(reader)), None, 48, 2, least=10**9)


@pytest.mark.parametrize("name", ["Gemma2 gemma2", "GptOss gpt_oss", "Mistral mistral"])
def test_softcaps_sinks_and_windows_are_those_of_the_model(name: str) -> None:
    model = peaked(build(f"{name.split()[0]}ForCausalLM", name.split()[1])).requires_grad_(False)
    for key, each in model.named_parameters():
        if key.endswith("sinks"):
            each.copy_(torch.linspace(-2, 8, 4))
    ids = torch.randint(3, 120, (1, 40), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    wanted = model(input_ids=ids, output_attentions=True, use_cache=False)
    cache, window = read(model, h2o(1.0), ids), read(model, snapkv(1.0, window=4), ids).store
    near = partial(torch.testing.assert_close, atol=5e-3, rtol=5e-3)
    for number, (index, seen) in enumerate(zip(cache.owned, seen_by(model, ids), strict=True)):
        each = wanted.attentions[index]
        last = window._observation(window.layers[number], window._rings[number])
        near(seen.attention(torch.arange(5, 40)), each[:, :, 5:])
        near(last.probs(4).flatten(1, 2), each[:, :, -4:])
        near(cache.store.layers[number].stats["mass"], each.unflatten(1, (2, 2)).mean(2).sum(2))
    with stages._gated(model, dict.fromkeys(cache.owned, torch.ones(2)), 2, 8):
        near(model(input_ids=ids, use_cache=False).logits, wanted.logits)


@pytest.fixture(scope="module")
def measured(reader: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of every kind, measured on texts."""
    into = tmp_path_factory.mktemp("own")
    chosen = TextModel(str(reader))
    model, found = chosen.load(), windows(chosen, texts, 48, 2)
    work = Work(model, TextSamples(found.ids, found.source, questions=2), lambda *_: None)
    for name in stages.MAKERS:
        stages.make(name, work, into / f"{name}.safetensors", chosen.weights, **SHORT.get(name, {}))
    assert model.config._attn_implementation == "sdpa"
    assert all(each.requires_grad for each in model.parameters())
    return into


def test_every_recipe_takes_the_tables_of_its_model(measured: Path, reader: Path) -> None:
    chosen = TextModel(str(reader))
    model, weights = chosen.load(), chosen.weights
    ids = torch.randint(2, 258, (1, 48), generator=torch.Generator().manual_seed(1))
    assert set(ACTING) == set(stages.MAKERS)
    for name, acting in ACTING.items():
        word = f"{name}:tables={measured / name}.safetensors" + f",{acting}" * bool(acting)
        recipe = recipe_words.parse_recipe(word, weights)
        bare = recipe_words.parse_recipe(word.replace(f"{name}:", f"{name.replace('_', '-')}:"), weights)
        assert repr(bare) == repr(recipe)
        cache = cache_for(model, recipe)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            if name != "epicache":  # acts when it is asked to
                out = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
                assert out.logits.isfinite().all(), name
    detach(model)


def test_tables_of_another_model_recipe_or_setting_are_refused(measured: Path, tmp_path: Path) -> None:
    file = measured / "compresskv.safetensors"
    with pytest.raises(TablesError, match="a model of other weights .*calibrate"):
        recipe_words.parse_recipe(f"compresskv:tables={file}", DIGEST)
    with pytest.raises(TablesError, match="other weights"):
        recipe_words.parse_recipe(f"compresskv:heads=@{file}", DIGEST)
    with pytest.raises(TablesError, match="has tables of compresskv; .*makes those of prefixkv"):
        recipe_words.parse_recipe(f"prefixkv:tables={file}")
    two = {"1": torch.ones(2), "2": torch.ones(2)}
    about = {"kind": "table", "recipe": "prefixkv", "gives": {"shares": ["1", "2"]}}
    recipe_words.write_table(tmp_path / "x.safetensors", two, about)
    with pytest.raises(TablesError, match="has shares for 1, 2; say which behind a #"):
        recipe_words.parse_recipe(f"prefixkv:tables={tmp_path}/x.safetensors")
    recipe_words.parse_recipe(f"prefixkv:tables={tmp_path}/x.safetensors#2")


def test_shipped_tables_are_of_the_shipped_model() -> None:
    weights = recipe_words.weights_digest(KVTask().directory)
    names = [file.stem for file in recipe_words.FOLDER.glob("*.safetensors")]
    assert set(names) == set(stages.MAKERS) - {"epicache", "a2ats", "xquant_latent"}
    for name in names:
        with safe_open(recipe_words.FOLDER / f"{name}.safetensors", "pt") as file:
            about = json.loads(file.metadata()["about"])
        assert (about["recipe"], about["weights"]) == (name, weights)
        for entries in about["gives"].values():
            assert recipe_words.settings_of(f"{name}#{entries[-1]}", name, weights)


def test_the_command_measures_and_says_how_to_take_it(reader: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    shape = ["calibrate", "--model", reader, "--texts", texts, "--out", out, "--context", 48]
    found = call(*shape, "--samples", 2, "--recipe", "double-sparsity:channels=2")
    assert found.exit_code == 0, found.output
    assert f"--recipe double_sparsity:tables={out}" in " ".join(found.output.split())
    with safe_open(out, "pt") as file:
        about = json.loads(file.metadata()["about"])
        assert file.get_tensor("channels").shape == (3, 2, 2)
    assert about["samples"]["texts"] == "texts.txt" and about["samples"]["count"] == 2
    assert about["settings"] == {"channels": 2}


def test_the_shipped_model_needs_no_texts(tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    shape = ["calibrate", "--out", out, "--context", 257, "--samples", 1]
    found = call(*shape, "--model", "recall-llama", "--recipe", "razor_attention:period=8")
    assert found.exit_code == 0, found.output
    assert "heads" in recipe_words.settings_of(str(out), "razor_attention")
    found = call(*shape, "--model", "a/b", "--recipe", "razor_attention")
    assert found.exit_code == 2 and "--texts is missing" in " ".join(found.output.split())
    found = call(*shape, "--model", "recall-llama", "--recipe", "duo")
    assert found.exit_code == 2 and "no table 'duo'; there are" in " ".join(found.output.split())


def test_settings_that_the_model_cannot_have_are_refused(reader: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    shape = ["calibrate", "--model", reader, "--texts", texts, "--out", out, "--context", 48]
    found = call(*shape, "--samples", 2, "--recipe", "compresskv:heads=9")
    assert found.exit_code == 2 and "must be [L, Hq] and 1 to Hq heads" in found.output
    assert not out.exists()
