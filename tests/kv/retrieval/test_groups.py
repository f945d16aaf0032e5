"""Sentences, frames and probes: whole groups of tokens, and what stands for a question."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kv.attend import Query, attend, logits
from diffcache.kv.layer import KVLayer
from diffcache.kv.positions import Slot
from diffcache.kv.retrieval.probe_query import ProbeQuery, bias
from diffcache.kv.retrieval.rekv import Frames
from diffcache.kv.retrieval.sentence import Sentences, sentence_tags
from diffcache.kv.retrieval.summary import known
from diffcache.kv.slots import Slots
from tests.kv.retrieval.setting import FEW, B, D, G, H, Row, noise, rotary, run, tokens

# sentences and frames ----------------------------------------------------------------------


def test_sentences_end_where_their_ends_are() -> None:
    ids = torch.tensor([[0, 0, 5, 9, 7, 9, 9, 3], [4, 9, 9, 5, 6, 7, 8, 9]])
    assert sentence_tags(ids, {9}).tolist() == [[1, 1, 1, 1, 2, 2, 3, 4], [1, 1, 2, 3, 3, 3, 3, 3]]
    assert sentence_tags(ids, {9}, pad=0)[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 4]


def test_whole_sentences_are_read() -> None:
    k, v, q = tokens(80)
    tag = sentence_tags((torch.arange(80) % 11 == 10).long().expand(B, -1), {1})[:, None]
    chooser = Sentences(45, block=8, sinks=0, recent=3, group="mean")
    _, layer = run(chooser, "sentence", k, v, q, 79, tag=tag)
    chosen = known(layer).state["chosen"]
    mean = torch.stack([k[:, :, 11 * i : 11 * i + 11].mean(2) for i in range(7)], 2)
    asked = q[:, :, -1].reshape(B, H, G, D).mean(2)
    score = torch.einsum("bhd,bhnd->bhn", asked, mean)
    for row in range(B):
        for head in range(H):
            found = [p for p in chosen[row, head].tolist() if p >= 0]
            sentences = {p // 11 for p in found}
            want = score[row, head].argsort(descending=True)[:3].tolist()
            assert sentences - {7} <= set(want) and len(found) <= 42
            assert all(found.count(p) == 1 for s in sentences - {7} for p in range(11 * s, 11 * s + 11))


def test_frames_see_the_last_tokens_and_a_question_its_frames(reads: dict[KVLayer, Tensor]) -> None:
    chooser = Frames(6 + 10, sinks=2, recent=4, block=5, few=1)
    line = Row("rekv")
    k, v, q = tokens(60)
    tag = (torch.arange(60) // 5 + 1).to(torch.int32).expand(B, 1, -1).clone()
    tag[..., 50:] = 0
    turn = rotary()
    plain = turn.unrotate(k, torch.arange(60)) * 0.1
    plain[:, :, 20:25] = plain[:, :, 35:40] = 3.0
    k = turn.rotate(plain, torch.arange(60))
    q[:, :, 50:56] = turn.rotate(torch.ones(B, H * G, 6, D), torch.arange(50, 56))
    outs = []
    for first, last in ((0, 45), (45, 50), (50, 56), (56, 57), (57, 58)):
        part = slice(first, last)
        outs.append(line.step(chooser, k[:, :, part], v[:, :, part], q[:, :, part], tag=tag[..., part]))
        if last == 50:
            assert int(reads[line.layers[0]].amax()) == 2 + 4 + 5 - 1
        if last >= 56:  # the question's frames are read until the next question
            chosen = [p for p in known(line.layers[0]).state["chosen"][0, 0].tolist() if p >= 0]
            assert {p for p in chosen if p < 45} == {*range(20, 25), *range(35, 40)}


def test_frames_are_read_at_positions_without_gaps() -> None:
    k, v, q = tokens(50)
    chooser = Frames(25, sinks=2, recent=4, block=5)
    layer = KVLayer(rotary=rotary(), positions=Slot())
    layer.write(k[:, :, :49], v[:, :, :49])
    chooser.views(Query(q[:, :, :49], 0, 0.25), layer, [layer])
    layer.write(k[:, :, 49:], v[:, :, 49:])
    query = Query(rotary().rotate(q[:, :, 49:], 49.0), 49, 0.25)
    out = attend(query, chooser.views(query, layer, [layer]))
    pos = known(layer).state["chosen"][:, 0].long()
    for row in range(B):
        kept = sorted({0, 1, 46, 47, 48, 49, *(p for p in pos[row].tolist() if p >= 0)})
        assert 6 < len(kept) < 50
        near = torch.arange(50 - len(kept), 50)
        slots = Slots(
            rotary().rotate(k[row : row + 1, :, kept], near),
            v[row : row + 1, :, kept],
            {"pos": near.to(torch.int32).expand(1, 1, -1)},
        )
        want = logits(Query(query.q[row : row + 1], 49, 0.25), slots).softmax(-1)
        want = torch.einsum("bhgns,bhsd->bhgnd", want, slots.v).flatten(1, 2)
        torch.testing.assert_close(out[row : row + 1], want, atol=2e-6, rtol=1e-5)


# probes ------------------------------------------------------------------------------------


def test_unusual_queries_weigh_more_and_padding_nothing() -> None:
    q = noise(B, H * G, 9, D, seed=2) * 0.1
    q[:, :, 5] += 3
    valid = torch.ones(B, 9, dtype=torch.bool)
    valid[1, :2] = False
    q[1, :, :2] = 1e4
    found = bias(Query(q, 0, 1.0), valid)
    torch.testing.assert_close(found.sum(-1), torch.ones(B, H * G))
    assert bool((found.argmax(-1) == 5).all()) and not found[1, :, :2].any()
    mean = q[0].mean(1, keepdim=True)
    away = (q[0] - mean) ** 2
    want = (away / away.mean(1, keepdim=True)).sum(-1)
    torch.testing.assert_close(found[0], want / want.sum(-1, keepdim=True))
    alike = bias(Query(torch.ones(B, H * G, 9, D), 0, 1.0), valid)
    torch.testing.assert_close(alike[1, 0], torch.tensor([0.0] * 2 + [1 / 7] * 7))


def test_density_cuts_off_what_holds_little_mass(reads: dict[KVLayer, Tensor]) -> None:
    k, v, q = tokens(200)
    few = [
        int(reads[run(ProbeQuery(150, density=d, block=4, **FEW), "probe_query", k, v, q, 199)[1]].sum())
        for d in (0.3, 0.8, 1.0)
    ]
    assert few[0] < few[1] < few[2] <= 4 * 150


def test_a_chunk_of_a_prompt_chooses_by_its_probe(reads: dict[KVLayer, Tensor]) -> None:
    k, v, q = tokens(120)
    line, chooser = Row("probe_query"), ProbeQuery(60, block=4, sinks=2, recent=4)
    for part in (slice(0, 80), slice(80, 120)):
        line.step(chooser, k[:, :, part], v[:, :, part], q[:, :, part])
    read = int(reads[line.layers[0]].amax())
    assert 45 < read <= 60 + 39  # the chunk itself, and few before it
