"""Retrievers: all is dense attention, needles are found, rows do not mix; and particulars by loops."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query, attend, logits
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.layer import KVLayer
from diffcache.kv.learn.label_channels import LabelCalibration
from diffcache.kv.positions import Slot
from diffcache.kv.retrieval import select
from diffcache.kv.retrieval.blocks import Blocks, bounds, mean_keys
from diffcache.kv.retrieval.mpcache import MinMaxTree
from diffcache.kv.retrieval.probe_query import ProbeQuery, bias
from diffcache.kv.retrieval.quest import Quest, upper
from diffcache.kv.retrieval.rekv import Frames
from diffcache.kv.retrieval.select import top
from diffcache.kv.retrieval.sentence import sentence_tags
from diffcache.kv.retrieval.summary import Summary, known
from diffcache.kv.segment import Coded, Dense
from diffcache.kv.slots import Slots
from tests.kv.retrieval.setting import FEW, MADE, B, D, G, H, Row, noise, rotary, run, tokens

EACH = pytest.mark.parametrize("name", MADE)


@EACH
def test_settled_segments_are_read_like_the_tail(name: str) -> None:
    k, v, q = tokens(90)
    chooser = MADE[name](30)
    one, layer = run(chooser, name, k, v, q, 80)
    two = KVLayer(rotary=layer.rotary)
    slots = layer.read()
    two.write(slots.k[:, :, :50], slots.v[:, :, :50])
    two.settle_tail()
    two.write(slots.k[:, :, 50:89], slots.v[:, :, 50:89])
    assert isinstance(two.segments[0], Dense)
    two.write(slots.k[:, :, 89:], slots.v[:, :, 89:])
    two.summary = None
    query = Query(q[:, :, -1:], 89, D**-0.5)
    if name in ("rekv", "sentence"):  # blocks that a tag begins, queries of the sentence
        layer.summary = None
        one = attend(query, chooser.views(query, layer, [layer]))
    if name == "a2ats":  # one codebook for both: that of the prompt
        two.summary = layer.summary
    found = attend(query, chooser.views(query, two, [two]))
    torch.testing.assert_close(found, one[:, :, -1:], atol=2e-6, rtol=1e-5)


def test_top_takes_as_many_as_there_is_room_for_whatever_the_ties() -> None:
    score = torch.tensor([[[[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 9.0]]]])
    free = torch.tensor([[[True, True, True, True, False]]])
    assert top(score[:, :, :1], free, torch.tensor([[2]])).tolist() == [[[0, 0, 1, 1, 0]]]
    assert top(score, free, torch.tensor([[1]])).tolist() == [[[0, 0, 0, 1, 0]]]
    assert top(score, free, torch.tensor([[9]])).tolist() == [[[1, 1, 1, 1, 0]]]
    assert not top(score, free, torch.tensor([[0]])).any()


def made(width: int, empty: Tensor | None = None, tag: Tensor | None = None) -> Slots:
    k, v, _ = tokens(width)
    pos = torch.arange(width, dtype=torch.int32).expand(B, 1, -1)
    if empty is not None:
        pos = pos.where(~empty, -1)
    return Slots(k, v, {"pos": pos} if tag is None else {"pos": pos, "tag": tag})


def in_pieces(blocks: Blocks, slots: Slots, pieces: list[int]) -> Summary:
    found, first = Summary(), 0
    for width in pieces:
        part = slots.narrow(first, first + width)
        found = replace(found, slots=found.slots_with(pos=part.pos))
        found = blocks.extend(found, part)
        first += width
    return found


@pytest.mark.parametrize("pieces", [[50], [20, 30], [7] * 7 + [1], [1] * 50])
def test_blocks_are_what_a_loop_over_tokens_makes(pieces: list[int]) -> None:
    generator = torch.Generator().manual_seed(4)
    empty = torch.rand(B, 1, 50, generator=generator) < 0.3
    empty[0] = False
    tag = (torch.rand(B, 1, 50, generator=generator) < 0.2).cumsum(-1).to(torch.int32)
    tag[:, :, 30:] = 0
    slots = made(50, empty, tag)
    found = in_pieces(Blocks(4, "bounds", tagged=6), slots, pieces)
    means = mean_keys(in_pieces(Blocks(4, "mean", tagged=6), slots, pieces))
    lo, hi = bounds(found)
    for row in range(B):
        members: list[list[int]] = []
        last = None
        for slot in range(50):
            if empty[row, 0, slot]:
                assert int(found.slots["block"][row, 0, slot]) == -1
                continue
            now = int(tag[row, 0, slot])
            if now != last or len(members[-1]) == (6 if now else 4):
                members.append([])
            members[-1].append(slot)
            last = now
            assert int(found.slots["block"][row, 0, slot]) == len(members) - 1
        for number, inside in enumerate(members):
            keys = slots.k[row][:, inside]
            assert int(found.blocks["count"][row, 0, number]) == len(inside)
            assert torch.equal(lo[row, :, number], keys.amin(1))
            assert torch.equal(hi[row, :, number], keys.amax(1))
            torch.testing.assert_close(means[row, :, number], keys.mean(1))
        assert not found.blocks["count"][row, 0, len(members) :].any()


def test_no_logit_is_above_the_bound_of_its_block() -> None:
    slots = made(67, torch.arange(67).expand(B, 1, -1) < torch.tensor([0, 11]).view(B, 1, 1))
    summary = in_pieces(Blocks(16, "bounds"), slots, [60, 1, 6])
    query = Query(noise(B, H * G, 3, D, seed=5), 70, 0.3)
    found = upper(query, summary)
    true = logits(query, slots)
    block = summary.slots["block"]
    for row in range(B):
        for number in range(int(block[row].max()) + 1):
            inside = block[row, 0] == number
            most = true[row][..., inside].amax(-1)
            assert bool((found[row, ..., number] >= most - 1e-5).all())
    # A page of one token is its logit.
    exact = upper(query, in_pieces(Blocks(1, "bounds"), made(67), [67]))
    torch.testing.assert_close(exact, logits(query, made(67)))


def test_the_channels_that_matter_are_found() -> None:
    watch = LabelCalibration()
    k, v, q = (x * 0.1 for x in tokens(60))
    loud = torch.tensor([[1, 4], [7, 9]])
    for head in range(H):
        k[:, head, :, loud[head]] += 5
        q[:, head * G : (head + 1) * G, :, loud[head]] += 5
    k[:, 0, :, 2] += 6  # large, but never asked for
    layer = KVLayer()
    valid = torch.ones(B, 60, dtype=torch.bool)
    valid[1, :20] = False
    k[1, :, :20, 3] = 1e6  # padding
    layer.write(k, v, valid=valid)
    watch.views(Query(q, 0, 1.0), layer, [layer])
    assert watch.channels(2) == (((1, 4), (7, 9)),)
    assert watch.channels(1, by="k")[0][0] == (2,)
    with pytest.raises(ValueError, match="count=17"):
        watch.channels(17)


def test_only_pages_that_are_read_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where values wait for their codes; and rows without gaps choose as masks do."""
    k, v, q = tokens(93)
    pair = Pair(GroupQuant(4, "tokens", 8), GroupQuant(4, "channels", 8), block=16, slide=True)
    layer = KVLayer()
    for first, last in pairwise([0, 60, *range(61, 94)]):
        pair.flush([layer])
        layer.write(k[:, :, first:last], v[:, :, first:last])
    (segment,) = layer.segments
    assert isinstance(segment, Coded) and segment.exact is not None
    whole, query = layer.read(), Query(q[:, :, -1:], 92, 0.25)
    monkeypatch.setattr(Coded, "read", lambda self: pytest.fail("all was decoded"))
    (view,) = Quest(33, page=8, sinks=3, recent=9).views(query, layer, [layer])
    read = view.slots
    assert not known(layer).slots and read.width < 60
    for row in range(B):
        for head in range(H):
            there = read.pos[row, head] >= 0
            at = read.pos[row, head, there].long()
            assert len(set(at.tolist())) == len(at) <= 33
            assert torch.equal(read.k[row, head, there], whole.k[row, head, at])
            assert torch.equal(read.v[row, head, there], whole.v[row, head, at])
    monkeypatch.undo()
    monkeypatch.setattr(select, "is_gapless", lambda layer: False)
    layer.summary = None
    (masked,) = Quest(33, page=8, sinks=3, recent=9).views(query, layer, [layer])
    for mine, theirs in zip(read.pos.flatten(0, 1), masked.slots.pos.flatten(0, 1), strict=True):
        assert set(mine.tolist()) - {-1} == set(theirs.tolist()) - {-1}


def test_mpcache_reads_small_clusters_of_the_large_ones_that_pass() -> None:
    k, v, q = tokens(128)
    chooser = MinMaxTree(32 + 8, large=16, small=4, widen=1.0, sinks=0, recent=8, group="mean")
    _, layer = run(chooser, "mpcache", k, v, q, 127)
    asked = q[:, :, -1].reshape(B, H, G, D).mean(2)
    parts = (k.unflatten(2, (-1, size)) for size in (16, 4))
    large, small = (torch.einsum("bhd,bhnd->bhn", asked, 0.6 * x.amax(3) + 0.4 * x.amin(3)) for x in parts)
    for row in range(B):
        for head in range(H):
            order, room, passed = large[row, head].argsort(descending=True), 32, []
            for number in order.tolist():
                size = 8 if number == 7 else 16  # half of the last is read anyway
                if size > room:
                    break
                room -= size
                passed += list(range(number * 4, number * 4 + 4))
            ranked = [n for n in small[row, head].argsort(descending=True).tolist() if n in passed]
            ranked = [n for n in ranked if n < 30][:8]
            want = sorted(4 * n + i for n in ranked for i in range(4))
            found = [p for p in known(layer).state["chosen"][row, head].tolist() if p >= 0]
            assert found == want


def test_sentences_end_where_their_ends_are() -> None:
    ids = torch.tensor([[0, 0, 5, 9, 7, 9, 9, 3], [4, 9, 9, 5, 6, 7, 8, 9]])
    assert sentence_tags(ids, {9}).tolist() == [[1, 1, 1, 1, 2, 2, 3, 4], [1, 1, 2, 3, 3, 3, 3, 3]]
    assert sentence_tags(ids, {9}, pad=0)[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("few", [1, 5])
def test_frames_see_the_last_tokens_and_a_question_its_frames(few: int, reads: dict[KVLayer, Tensor]) -> None:
    chooser = Frames(6 + 10, sinks=2, recent=4, block=5, few=few)
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
        part, place = slice(row, row + 1), near.to(torch.int32).expand(1, 1, -1)
        slots = Slots(rotary().rotate(k[part, :, kept], near), v[part, :, kept], {"pos": place})
        want = logits(Query(query.q[row : row + 1], 49, 0.25), slots).softmax(-1)
        want = torch.einsum("bhgns,bhsd->bhgnd", want, slots.v).flatten(1, 2)
        torch.testing.assert_close(out[row : row + 1], want, atol=2e-6, rtol=1e-5)


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
    choosers = [ProbeQuery(150, density=d, block=4, **FEW) for d in (0.3, 0.8, 1.0)]
    few = [int(reads[run(chooser, "probe_query", k, v, q, 199)[1]].sum()) for chooser in choosers]
    assert few[0] < few[1] < few[2] <= 4 * 150


def test_a_chunk_of_a_prompt_chooses_by_its_probe(reads: dict[KVLayer, Tensor]) -> None:
    k, v, q = tokens(120)
    line, chooser = Row("probe_query"), ProbeQuery(60, block=4, sinks=2, recent=4)
    for part in (slice(0, 80), slice(80, 120)):
        line.step(chooser, k[:, :, part], v[:, :, part], q[:, :, part])
    read = int(reads[line.layers[0]].amax())
    assert 45 < read <= 60 + 39  # the chunk itself, and few before it
