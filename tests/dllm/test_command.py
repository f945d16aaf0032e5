"""`diffcache run` on a saved diffusion language model."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import diffcache
from diffcache.cli import app
from diffcache.dllm import FastDLLM, Schedule
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.registry import WORDS, rows_of
from tests.dllm.toys import EOS, MASK, bidirectional

PROMPT = "w7 w8 w9"


def save(folder: Path) -> Path:
    """Save a model with a tokenizer of words and with settings of its own."""
    bidirectional(torch.float32).save_pretrained(folder)
    words = {f"w{number}": number for number in range(EOS)} | {"[EOS]": EOS, "[MASK]": MASK}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[EOS]", mask_token="[MASK]").save_pretrained(folder)
    (folder / "diffcache.json").write_text('{"call": {"length": 8, "block": 4}}')
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"))


def call(*words: object) -> str:
    done = CliRunner().invoke(app, ["run", *map(str, words), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    return done.output


def test_an_answer_is_streamed_with_its_report(saved: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    output = call(saved, PROMPT, "--method", "fast-dllm:dual=True", "--json", record, "--compare")
    lm = DiffusionLM.from_pretrained(str(saved), dtype=torch.float32)
    alone = lm.generate(PROMPT, Schedule(8, 4, eos_id=EOS))
    diffcache.wrap(lm.model, "fast-dllm", dual=True)
    cached = lm.generate(PROMPT, Schedule(8, 4, eos_id=EOS))
    assert cached.texts is not None and output.startswith(cached.texts[0] + "\n")
    assert "FastDLLM(dual=True)" in output and "token-layers" in output
    known = json.loads(record.read_text())
    assert known["text"] == cached.texts and known["rows"] == cached.rows < alone.rows
    assert known["same_tokens"] == int((cached.ids == alone.ids).sum())


def test_settings_of_the_folder_can_be_changed(saved: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    call(saved, PROMPT, "--length", 6, "--block", 3, "--steps", 2, "--json", record)
    assert json.loads(record.read_text())["forwards"] == 2
    call(saved, PROMPT, "--threshold", 0, "--json", record)
    assert json.loads(record.read_text())["forwards"] == 2  # one a block of 4
    for words, forwards in (((), 1), (("--block", 4), 2)):  # a window of 16, unless blocks are said
        call(saved, PROMPT, "--threshold", 0, "--method", "elastic", *words, "--json", record)
        assert json.loads(record.read_text())["forwards"] == forwards


def test_blocks_are_the_models_own_where_its_attention_has_them(tmp_path: Path) -> None:
    words = " ".join("abcdefgh"[place % 8] for place in range(47))
    record = tmp_path / "run.json"
    call("chain-block", words, "--method", "block-cache", "--compare", "--json", record)
    known = json.loads(record.read_text())
    assert known["same_tokens"] == known["forwards"] == 47 and known["rows"] < 47 * 96 / 2


def test_a_guide_settles_most_of_an_answer_at_once(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    letters = " ".join("abcdef"[place % 6] for place in range(128))
    words = ["--guide", "chain-guide", "--method", "free-cache:commit=True", "--json", record]
    call(Path("chain-llada"), letters, *words)
    assert json.loads(record.read_text())["forwards"] < 64  # of 128 tokens


def test_policies_by_name_of_which_no_two_caches_share_one() -> None:
    names = [name.replace("_", "-") for kind in WORDS for name in rows_of(kind)]
    assert len(names) == len(set(names))
    assert diffcache.catalog.make_method("fast_dllm", dual=True) == FastDLLM(dual=True)
    for name, row in rows_of("dllm").items():
        assert diffcache.catalog.method_class(name).name == name
        assert not row.paper or "@" in diffcache.cite(name)
