"""Language models behind one interface: batches, stop strings and likelihoods."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from diffcache.errors import DiffcacheError
from diffcache.eval.language import harness
from diffcache.eval.language.models import CausalLanguage, DiffusionLanguage, encode_pair


def ignorant(probabilities):
    """A diffusion model whose prediction is the same at every place."""
    return lambda ids: probabilities.log().expand(*ids.shape, -1)


def test_pairs_are_parted_at_the_white_space(tokenizer):
    assert encode_pair(tokenizer, "what is ", "1 plus") == ([1, 5, 6], [10, 7])
    assert encode_pair(tokenizer, "", "1") == ([1], [10])
    with pytest.raises(ValueError, match="has no token of its own"):
        encode_pair(tokenizer, "what", " ")


def test_causal_generation_in_a_batch_equals_one_by_one(llama, tokenizer):
    prompts = ["what is 1 plus 2", "answer", "3 4 5"]
    alone = CausalLanguage(llama, tokenizer).generate(prompts, 6, [])
    made = []

    def cache():
        made.append(DynamicCache(config=llama.config))
        return made[-1]

    batch = CausalLanguage(llama, tokenizer, cache, batch_size=2)
    assert batch.generate(prompts, 6, []) == alone
    assert len(made) == 2 and made[0].get_seq_length() > 6  # a fresh one a call, and used
    for prompt, text in zip(prompts, alone, strict=True):
        ids = [1, *tokenizer.encode(prompt, add_special_tokens=False)]
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(llama(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 2:
                break
        begin = 1 + len(prompt.split())
        assert text == tokenizer.decode(ids[begin:], skip_special_tokens=True)
    assert harness.cut("a b Q: c", ["Q:", "b"]) == "a "


def test_causal_generation_ends_at_a_stop_string(llama, tokenizer):
    language = CausalLanguage(llama, tokenizer)
    prompts = [f"{a} plus {b}" for a in range(10) for b in range(3)]
    texts = dict(zip(prompts, language.generate(prompts, 12, []), strict=True))
    prompt = max(texts, key=lambda key: len(set(texts[key].split())))
    words = texts[prompt].split()
    stop = next(word for word in words[1:] if word != words[0])
    (text,) = language.generate([prompt], 12, [stop])
    assert text.split() == words[: words.index(stop) + 1] != words
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        language.generate(["what"], 64, [])


def test_diffusion_language_scores_and_counts(tokenizer, words):
    probabilities = torch.full((len(words),), 1 / len(words))
    probabilities[10] += 0.5
    probabilities /= probabilities.sum()
    model = SimpleNamespace(logits=ignorant(probabilities), generate=lambda p, n, s: ["1"])
    language = DiffusionLanguage(model, tokenizer, mask_id=3, mc_num=8)
    value, greedy = language.score([5, 6], [10, 10])
    assert value == pytest.approx(2 * math.log(probabilities[10]), rel=1e-6) and greedy
    assert not language.score([5, 6], [10, 11])[1]
    assert language.rolling([10]) == pytest.approx(math.log(probabilities[10]), rel=1e-6)
    with pytest.raises(DiffcacheError, match="1 texts for 2 prompts"):
        language.generate(["a", "b"], 4, [])
