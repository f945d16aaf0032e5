"""Perplexity and the bound of diffusion models, against numbers worked out by hand."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from diffcache.eval.language.perplexity import (
    causal_perplexity,
    diffusion_nats,
    diffusion_perplexity,
    text_nats,
    windows,
)


class Table(nn.Module):
    """A causal model that knows the next token from this one only."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table.log())

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table[input_ids])


def bigrams(size=7):
    return torch.rand(size, size, generator=torch.Generator().manual_seed(0)).softmax(-1)


def by_hand(table, ids):
    return -sum(math.log(table[a, b]) for a, b in pairwise(ids))


def test_a_uniform_model_is_as_perplexed_as_its_vocabulary_is_large(tokenizer, words):
    size = len(words)
    model = Table(torch.full((size, size), 1 / size))
    texts = ["what is 1 plus 2", "answer 3"]
    result = causal_perplexity(model, tokenizer, texts, window=4, stride=2, batch_size=3)
    assert result.value == pytest.approx(size, rel=1e-6)
    assert result.tokens == 7  # every token once, from the beginning-of-sequence token on
    assert result.bits_per_byte == pytest.approx(7 * math.log2(size) / 24)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize(("window", "stride"), [(64, 32), (5, 4), (5, 1), (2, 1)])
def test_a_bigram_table_by_hand(window, stride, batch_size):
    table = bigrams()
    texts = [[0, 1, 2, 3, 4, 5, 6, 0, 3], [4, 4], [6, 5, 4, 3, 2, 6]]
    found = text_nats(Table(table), texts, window=window, stride=stride, batch_size=batch_size)
    assert found == pytest.approx([by_hand(table, ids) for ids in texts], rel=1e-6)


def test_padding_does_not_reach_a_real_model(llama):
    torch.manual_seed(0)
    texts = [torch.randint(4, 19, (n,)).tolist() for n in (30, 5, 17)]
    alone = text_nats(llama, texts)
    assert text_nats(llama, texts, batch_size=3) == pytest.approx(alone, rel=1e-5)
    cached = text_nats(llama, texts, cache=lambda: DynamicCache(config=llama.config))
    assert cached == pytest.approx(alone, rel=1e-6)
    with torch.no_grad():
        loss = llama(torch.tensor([texts[0]]), labels=torch.tensor([texts[0]])).loss
    assert alone[0] / 29 == pytest.approx(float(loss), rel=1e-5)


def test_a_stride_of_one_gives_every_token_a_full_window(llama):
    ids = torch.randint(4, 19, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    total = 0.0
    with torch.no_grad():
        for place in range(1, 12):
            given = ids[max(0, place - 4) : place]
            total -= float(llama(torch.tensor([given])).logits[0, -1].log_softmax(-1)[ids[place]])
    assert text_nats(llama, [ids], window=5, stride=1) == pytest.approx([total], rel=1e-5)


def test_windows_score_every_token_once():
    for size in range(2, 20):
        for length in range(2, 9):
            for stride in range(1, length):
                scored = []
                for window in windows(range(size), length, stride):
                    assert len(window.tokens) <= length and window.first >= 1
                    scored += window.tokens[window.first :]
                assert scored == list(range(1, size))


def test_perplexity_says_what_is_wrong(tokenizer):
    model = Table(bigrams())
    with pytest.raises(ValueError, match="stride=5: must be 1 to window - 1 = 4"):
        text_nats(model, [[1, 2]], window=5, stride=5)
    with pytest.raises(ValueError, match=r"text 1 has 1 token\(s\)"):
        text_nats(model, [[1, 2], [1]])
    with pytest.raises(ValueError, match=r"texts=\[\]"):
        causal_perplexity(model, tokenizer, [])


def ignorant(probabilities):
    """A diffusion model whose prediction is the same at every place."""
    return lambda ids: probabilities.log().expand(*ids.shape, -1)


def test_the_diffusion_bound_is_exact_without_context():
    uniform = ignorant(torch.full((9,), 1 / 9))
    for mc_num in (1, 7, 64):  # equal tokens: every draw alike
        nats = diffusion_nats(uniform, torch.arange(8), 8, mc_num=mc_num, batch_size=5)
        assert nats == pytest.approx(8 * math.log(9), rel=1e-6)
    one = diffusion_nats(uniform, torch.arange(8), 8, prompt=5, mc_num=4)
    assert one == pytest.approx(3 * math.log(9), rel=1e-6)
    probabilities = torch.tensor([0.5, 0.2, 0.2, 0.05, 0.05])
    ids = torch.tensor([0, 1, 3, 0, 2, 4])
    true = -float(probabilities[ids].log().sum())
    found = diffusion_nats(ignorant(probabilities), ids, 4, mc_num=3000, batch_size=1000)
    assert found == pytest.approx(true, rel=0.02)
    assert found == diffusion_nats(ignorant(probabilities), ids, 4, mc_num=3000, batch_size=1000)
    whole = diffusion_perplexity(uniform, [torch.arange(8), torch.arange(3)], 8, mc_num=3)
    assert whole.value == pytest.approx(9, rel=1e-6) and whole.tokens == 11


def test_the_diffusion_bound_weighs_noise_levels_as_their_integral():
    """A model that is right exactly when some other token is left: the bound is the last's share.

    With m of L tokens masked only m = L costs, so the mean over m is `log V` for uniform guesses.
    """
    size, mask = 6, 5
    ids = torch.tensor([0, 1, 2, 3])

    def logits(noisy):
        uniform = torch.zeros(*noisy.shape, size)
        sure = torch.nn.functional.one_hot(ids, size).float() * 200
        known = (noisy != mask).any(1)
        return torch.where(known[:, None, None], sure.expand_as(uniform), uniform)

    for mc_num in (4, 40):  # stratified: each of the four levels gets its equal share
        assert diffusion_nats(logits, ids, mask, mc_num=mc_num) == pytest.approx(math.log(size))
    with pytest.raises(ValueError, match="more tokens than prompt"):
        diffusion_nats(logits, ids, mask, prompt=4)
