"""Language models of transformers with kernels on: which of their tokens are given to kernels."""

from typing import Any

import pytest
import torch

from diffcache.kernels.attention import FORWARD, MASS
from diffcache.kv import cache_for, h2o, quest, snapkv
from diffcache.kv.recipes.eviction import tova
from tests.kv.tiny import IDS, llama
from tests.zoo.language import build


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List queries, lists, offsets and windows that `attn_forward` was called with, and masses."""
    made: list[Any] = []
    launch, add = FORWARD.launch, MASS.launch
    monkeypatch.setattr(FORWARD, "launch", lambda *a: made.append((a[0].shape[2], a[3], *a[10:12])) or launch(*a))
    monkeypatch.setattr(MASS, "launch", lambda *a: made.append("mass") or add(*a))
    return made


def logits(model: Any, recipe: Any, inputs: Any, blank: int = 0) -> torch.Tensor:
    """Return the logits of the last three tokens, which are read at once, and of one more.

    Args:
        model: A language model.
        recipe: Recipe of its cache.
        inputs: Its tokens.
        blank: First tokens of the last row that are padding.
    """
    cache, found = cache_for(model, recipe), []
    for stop, width in ((21, 21), (24, 3), (25, 1)):
        ids = torch.cat([inputs, inputs[:, :1]], 1)[:, stop - width : stop]
        mask = torch.ones(len(ids), stop, dtype=torch.long)
        mask[-1, :blank] = 0
        with torch.no_grad():
            found.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(found[1:], 1)


@pytest.mark.parametrize("kind", ["drafted", "window", "chosen", "scored", "padded"])
def test_prompts_drafted_and_generated_tokens_take_the_kernel(kind: str, calls: list[Any], monkeypatch) -> None:
    model, layers = llama(num_hidden_layers=1), 1
    recipe: Any = snapkv(1.0, window=4)
    expected: list[Any] = [(3, None, 21, 0)]  # a prompt, and one token, see all there is
    if kind == "window":
        model = build("MistralForCausalLM", "mistral", sliding_window=16, num_hidden_layers=1)
        layers = model.config.num_hidden_layers
        expected = [(21, None, 0, 16), (3, None, 21, 16), (1, None, 24, 16)]
    elif kind == "chosen":
        recipe = quest(12, page=4, skip=0)
    elif kind in ("scored", "padded"):  # masses come from the log-sum-exps of the attention itself
        recipe = h2o(1.0)
        expected = [(21, None, 0, 0), "mass", (3, None, 21, 0), "mass", (1, None, None, 0), "mass"]
        if kind == "padded":  # a mask says what is seen
            expected = [(*each[:2], None, 0) if each != "mass" else each for each in expected]
    ids, blank = (IDS.repeat(2, 1), 4) if kind == "padded" else (IDS, 0)
    found = logits(model, recipe, ids, blank)
    if kind == "chosen":
        assert [each[0] for each in calls] == [3, 1]
        for _, listed, *limit in calls:  # drafted tokens have a mask beside
            assert listed.shape[2] < 25 and limit == [None, 0]
    else:
        assert calls == [each for each in expected for _ in range(layers)]
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    torch.testing.assert_close(found, logits(model, recipe, ids, blank), atol=2e-5, rtol=2e-5)


def test_a_window_is_not_kept_with_the_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is part of a mask: what is dropped does not depend on kernels."""
    model = build("MistralForCausalLM", "mistral", sliding_window=16, num_hidden_layers=1)
    ids = torch.cat([IDS, IDS[:, :6]], 1)
    found = []
    for kernels in ("triton", "torch"):
        monkeypatch.setenv("DIFFCACHE_KERNELS", kernels)
        cache = cache_for(model, tova(18))
        with torch.no_grad():
            for stop, width in ((24, 24), *((stop, 1) for stop in range(25, 31))):
                mask = torch.ones(1, stop, dtype=torch.long)
                model(ids[:, stop - width : stop], attention_mask=mask, past_key_values=cache)
        found.append([layer.meta()["pos"] for layer in cache.store.layers])
    assert all(map(torch.equal, *found))


def test_a_mask_that_was_written_to_is_looked_at_again() -> None:
    model, recipe = llama(num_hidden_layers=1), snapkv(1.0, window=4)
    mask = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()
    other = mask & (torch.arange(10) >= 3) | torch.eye(10, dtype=torch.bool)

    def read(cache: Any, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = model(IDS[:, :10], attention_mask=mask, past_key_values=cache).logits
        return torch.as_tensor(found)

    expected, cache = read(cache_for(model, recipe), other), cache_for(model, recipe)
    read(cache, mask)
    cache.reset()
    assert torch.equal(read(cache, mask.copy_(other)), expected)


def test_padding_takes_a_mask(calls: list[Any]) -> None:
    model = llama(num_hidden_layers=1)
    cache = cache_for(model, snapkv(1.0, window=4))
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :5] = 0
    ids = IDS.expand(2, -1)
    with torch.no_grad():
        model(ids[:, :21], attention_mask=mask[:, :21], past_key_values=cache)
        model(ids[:, 21:], attention_mask=mask, past_key_values=cache)
    assert not calls


def test_a_mask_is_in_order_for_the_window_that_it_was_made_for() -> None:
    writer = cache_for(llama(num_hidden_layers=1), snapkv(1.0, window=4)).writer
    mask = torch.ones(1, 1, 3, 10, dtype=torch.bool).tril(7)  # of queries at 7, 8 and 9
    found = [writer.is_in_order(mask, 7, window) for window in (None, 4, None, 16)]
    assert found == [True, False, True, True]
    assert not writer.is_in_order(mask, 6, None)
