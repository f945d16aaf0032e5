"""Models of grouped queries as models of multi-head latent attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from diffcache.kv import to_mla
from tests.kv.tiny import generate, llama, same

TEXTS = [torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
IDS = torch.randint(3, 250, (2, 48), generator=torch.Generator().manual_seed(3))
SIZE = 16


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def error(model: Any, **settings: Any) -> float:
    before, after = logits(model), logits(to_mla(model, TEXTS, **settings))
    return float((after - before).norm() / before.norm())


def related(turn: float) -> Any:
    """Return a model whose second key head is the first, each pair scaled and turned by itself."""
    model = llama().double()
    scale = torch.linspace(0.5, 2, SIZE // 2, dtype=torch.float64)[:, None]
    angle = turn * torch.linspace(0.2, 1.2, SIZE // 2, dtype=torch.float64)[:, None]
    for layer in model.model.layers:
        heads = layer.self_attn.k_proj.weight.data.view(2, 2, SIZE // 2, -1)
        real, imaginary = heads[0].clone()
        heads[1, 0] = scale * (angle.cos() * real - angle.sin() * imaginary)
        heads[1, 1] = scale * (angle.sin() * real + angle.cos() * imaginary)
    return model


@pytest.mark.parametrize(("heads", "rope"), [(1, None), (2, 32), (4, 64)])
def test_all_positions_and_ranks_lose_nothing(heads: int, rope: int | None, tmp_path: Path) -> None:
    model, drawn = llama(num_key_value_heads=heads), torch.get_rng_state()
    made = to_mla(model, TEXTS, rope=rope)
    assert torch.equal(torch.get_rng_state(), drawn)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    want = logits(model)
    for each in (made, loaded):
        assert torch.allclose(logits(each), want, atol=1e-4 * float(want.abs().max()))
    assert type(loaded).__name__ == "DeepseekV3ForCausalLM"
    same(generate(loaded), generate(model), 1e-3)


def test_heads_that_follow_one_another_are_one_rotary_head() -> None:
    assert error(related(0)) < 1e-5
    assert error(related(0), fold=2) > 1e-2  # neighbors turn by other angles
    assert error(related(1)) > 1e-2
    assert error(related(1), turned=True) < 1e-5


@pytest.mark.parametrize(("fold", "rope"), [(1, 16), (2, 16), (4, 16), (2, 8), (8, 4)])
def test_official_rotary_keys(fold: int, rope: int) -> None:
    """Rotary keys, against the arrangement of the authors' code (partial_rope.py at 7749e90)."""
    model, heads, collapse = llama(seed=5).double(), 2, SIZE // rope
    made = to_mla(model, TEXTS, rope=rope, fold=fold)
    found: list[torch.Tensor] = []
    module = model.model.layers[0].self_attn.k_proj
    hook = module.register_forward_pre_hook(lambda _, given: found.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        for ids in TEXTS:
            model(ids)
    hook.remove()
    x, folds = torch.cat(found), SIZE // 2 // fold
    keys = (x @ module.weight.T).detach()
    parts = keys.view(-1, heads, 2, folds, fold // collapse, collapse)
    parts = parts.permute(0, 2, 5, 1, 4, 3).reshape(-1, heads * fold, folds)
    turns = [torch.linalg.eigh(part.T @ part).eigenvectors.flip(1) for part in parts.unbind(2)]
    rows = keys.view(-1, heads, 2 * folds, fold // collapse, collapse).permute(0, 4, 1, 3, 2)
    rows = rows.reshape(-1, heads * fold, 2 * folds)
    rows = torch.einsum("dhc,nhd->ncd", torch.stack(turns + turns), rows)
    rows = rows.view(-1, collapse, heads, fold // collapse, 2, folds)
    theirs = rows.permute(0, 1, 2, 5, 3, 4).flatten(1)[:, :rope]
    ours = (x @ made.model.layers[0].self_attn.kv_a_proj_with_mqa.weight[-rope:].T).detach()
    pairs = [each.view(-1, rope // 2, 2) for each in (ours, theirs)]
    sign = (pairs[0] * pairs[1]).sum((0, 2)).sign()[:, None]  # of an eigenvector, either is right
    assert torch.allclose(pairs[0], sign * pairs[1], atol=1e-6)
