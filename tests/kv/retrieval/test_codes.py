"""Keys that stand for others: codebooks of A2ATS, low rank and landmarks of ShadowKV."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query, attend
from diffcache.kv.codec import lowrank
from diffcache.kv.codec.base import nbytes
from diffcache.kv.layer import KVLayer
from diffcache.kv.learn.codebook import Codebook, covariance, fit, nearest
from diffcache.kv.retrieval.a2ats import KeyCodes
from diffcache.kv.retrieval.shadowkv import Landmarks, Patched, ShadowKeys, landmarks, outlying
from diffcache.kv.retrieval.summary import Summary, known
from diffcache.kv.segment import Coded
from diffcache.kv.slots import Slots
from tests.kv.retrieval.setting import FEW, B, D, G, H, noise, rotary, run, tokens


def eye() -> Tensor:
    return torch.eye(D).expand(B, H, D, D)


def far_logits(k: Tensor, q: Tensor, far: int) -> Tensor:
    """Return the mean logits of the last query over keys met `far` before it, [B, H, S]."""
    turn, width = rotary(), k.shape[2]
    plain = turn.unrotate(k, torch.arange(width))
    met = turn.rotate(plain, float(width - 1 - far))
    return torch.einsum("bhgd,bhsd->bhs", q[:, :, -1].reshape(B, H, G, D), met) / G * D**-0.5


@pytest.mark.parametrize("far", [0, 20])
def test_exact_codes_are_exact_top_k(far: int) -> None:
    k, v, q = tokens(90)
    turn = rotary()
    plain = turn.unrotate(k, torch.arange(90))
    # One codebook for all rows, which holds the keys of both of them.
    book = Codebook(plain.transpose(0, 1).flatten(1, 2)[None], torch.eye(D).expand(1, H, D, D))
    chooser = KeyCodes(40, far=far, codebook=book, group="mean", **FEW)
    _, layer = run(chooser, "a2ats", k, v, q, 89)
    want = far_logits(k, q, far)[..., 2:82].topk(30).indices.sort(-1).values + 2
    assert torch.equal(known(layer).state["chosen"].long(), want)


def test_a_codebook_minds_the_directions_in_which_queries_look() -> None:
    keys, valid = noise(B, H, 400, D), torch.ones(B, H, 400, dtype=torch.bool)
    q = noise(B, H, 300, D, seed=3) * torch.logspace(1, -2, D)
    weight = covariance(q)

    def error(book: Tensor, by: Tensor) -> float:
        code = nearest(keys, book, by).long()[..., None].expand_as(keys)
        return float((q @ (keys - book.gather(2, code)).mT).square().mean())

    aware, plain = fit(keys, valid, weight, 16), fit(keys, valid, eye(), 16)
    assert error(aware, weight) < 0.6 * error(plain, eye())
    steps = [error(fit(keys, valid, weight, 16, n), weight) for n in (0, 1, 4, 8)]
    assert all(later <= sooner for sooner, later in pairwise(steps))


def written(width: int, codec: ShadowKeys, chooser: Landmarks | None) -> tuple[KVLayer, Tensor]:
    """Write a prompt, code it, write a token; return the layer and what the token attends to."""
    k, v, q = tokens(width)
    turn = rotary()
    plain = turn.unrotate(k, torch.arange(width))
    layer = KVLayer(rotary=turn)
    layer.write(plain[:, :, :-1], v[:, :, :-1])
    if chooser is not None:
        chooser.views(Query(q[:, :, :-1], 0, 0.25), layer, [layer])
    codec.flush([layer])
    layer.write(plain[:, :, -1:], v[:, :, -1:])
    query = Query(q[:, :, -1:], width - 1, 0.25)
    views = layer.views() if chooser is None else chooser.views(query, layer, [layer])
    return layer, attend(query, views)


def dense(width: int) -> Tensor:
    k, v, q = tokens(width)
    layer = KVLayer()
    layer.write(k, v)
    return attend(Query(q[:, :, -1:], width - 1, 0.25), layer.views())


def test_full_rank_and_all_slots_are_dense() -> None:
    codec = ShadowKeys(rank=H * D, outliers=0, recent=16, block=32)
    layer, found = written(200, codec, Landmarks(1.0, recent=16, outliers=0))
    assert isinstance(layer.segments[0], Coded) and layer.segments[0].width == 176
    torch.testing.assert_close(found, dense(200), atol=1e-5, rtol=1e-5)
    # All but one chunk, gathered from codes, values and tail, is a full cache without that chunk.
    layer, found = written(200, codec, Landmarks(192, sinks=0, recent=16, outliers=0, group="max"))
    k, v, q = tokens(200)
    chosen = known(layer).state["chosen"]
    inside = torch.zeros(B, H, 201, dtype=torch.bool)
    inside.scatter_(2, chosen.long().where(chosen >= 0, 200), True)
    inside[..., 184:] = True
    assert bool((inside[..., :200].sum(-1) == 192).all())
    score = torch.einsum("bhgd,bhsd->bhgs", q[:, :, -1].reshape(B, H, G, D), k) * 0.25
    score = score.masked_fill(~inside[:, :, None, :200], float("-inf")).softmax(-1)
    want = torch.einsum("bhgs,bhsd->bhgd", score, v).reshape(B, H * G, 1, D)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_a_landmark_has_the_mean_of_the_logits_of_its_chunk() -> None:
    k, v, _ = tokens(64)
    pos = torch.arange(64, dtype=torch.int32).expand(B, 1, -1)
    slots = Slots(k, v, {"pos": pos})
    found = landmarks(Summary(slots={"pos": pos}), slots, 8)
    q = noise(B, H, 1, D, seed=8)
    mean = found.blocks["sum"] / 8
    torch.testing.assert_close((q @ mean.mT)[:, :, 0], (q @ k.mT)[:, :, 0].unflatten(2, (8, 8)).mean(-1))
    chunks = k.unflatten(2, (8, 8))
    cosine = torch.nn.functional.cosine_similarity(chunks, chunks.mean(3, keepdim=True), dim=-1)
    torch.testing.assert_close(found.blocks["cosine"], cosine.amin(-1))
    worst = cosine.amin(-1).topk(2, largest=False).indices
    assert torch.equal(outlying(found, 2).nonzero()[:, 2].view(B, H, 2), worst.sort(-1).values)


def test_odd_chunks_and_last_tokens_stay_exact_and_the_rest_is_small() -> None:
    codec = ShadowKeys(rank=2, outliers=3, recent=16, block=32)
    layer, _ = written(400, codec, None)
    k, _, _ = tokens(400)
    plain = rotary().unrotate(k, torch.arange(400))
    found = layer.read().k
    exact = (found == plain).all(-1)
    assert bool((exact[..., :376].sum(-1) == 24).all()) and bool(exact[..., 376:].all())
    segment = layer.segments[0]
    assert isinstance(segment, Coded) and isinstance(segment.k, Patched)
    assert nbytes(segment.k) < 0.3 * plain[:, :, :376].numel() * 4
    index = torch.tensor([[[5, 300, 5]]]).expand(B, H, -1)
    taken = segment.k.take(index).decode()
    assert torch.equal(taken, found.gather(2, index[..., None].expand(-1, -1, -1, D)))
    rows = segment.k.rows(torch.tensor([1, 1])).decode()
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], segment.k.decode()[1])


def test_only_what_is_read_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    whole = lowrank.steady_product

    def spy(left: Tensor, *rest: Any) -> Tensor:
        widths.append(left.shape[:-1].numel() // B)
        return whole(left, *rest)

    monkeypatch.setattr(lowrank, "steady_product", spy)
    codec = ShadowKeys(rank=8, outliers=2, recent=16, block=32)
    written(400, codec, Landmarks(48, sinks=0, recent=16, outliers=2))
    assert 0 < sum(widths) <= 48 * H
