"""Contract of retrievers: all is the dense attention, needles are found, rows do not mix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.select import fill, top
from diffcache.kv.retrieval.summary import known, slots_read
from diffcache.kv.segment import Dense
from tests.kv.retrieval.setting import MADE, PRE, B, D, G, H, noise, rotary, run, tokens

EACH = pytest.mark.parametrize("name", MADE)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@EACH
@pytest.mark.parametrize("budget", [4096, 1.0])
def test_a_budget_of_all_is_dense(name: str, budget: int | float) -> None:
    k, v, q = tokens(70)
    found, _ = run(MADE[name](budget), name, k, v, q, 60)
    dense, _ = run(None, name, k, v, q, 60)
    assert torch.equal(found, dense)


@EACH
def test_slots_that_are_gathered_are_attended_to_as_they_are(name: str) -> None:
    """With all slots of one row and fewer of a padded one, the gathered ones are all there is."""
    k, v, q = tokens(64)
    valid = torch.ones(B, 60, dtype=torch.bool)
    valid[1, :23] = False
    found, layer = run(MADE[name](41), name, k, v, q, 60, valid)
    dense, _ = run(None, name, k, v, q, 60, valid)
    torch.testing.assert_close(found[1], dense[1], atol=1e-6, rtol=1e-5)
    read = known(layer).read
    assert read is not None
    # One layer that chooses reads all; what follows a question is read on top of the budget.
    assert int(read.amax()) <= {"tidal": 64, "rekv": 45}.get(name, 41)


@EACH
def test_a_row_alone_reads_what_it_reads_in_a_padded_batch(name: str) -> None:
    k, v, q = tokens(110)
    valid = torch.ones(B, 100, dtype=torch.bool)
    valid[1, :37] = False
    chooser = MADE[name](0.3)
    together, _ = run(chooser, name, k, v, q, 100, valid)
    # Alone, the row begins at position 0, and so do the rotations of its keys.
    later = (x[1:, :, 37:] for x in _moved(name, k, v, q, -37.0))
    alone, _ = run(chooser, name, *later, 63)
    torch.testing.assert_close(together[1:, :, 100:], alone[:, :, 63:], atol=2e-5, rtol=1e-4)


def _moved(name: str, k: Tensor, v: Tensor, q: Tensor, by: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens whose rotation is that of positions `by` later."""
    if name not in PRE:
        return k, v, q
    turn = rotary()
    return turn.shift(k, by), v, turn.shift(q, by)


@EACH
def test_one_needle_is_found(name: str) -> None:
    width, at, newest = 160, 77, 159
    k, v, q = tokens(width)
    k = k * 0.05
    needle = 6 * functional.normalize(noise(B, H, D, seed=9), dim=-1)
    k[:, :, at] = needle
    asked = (4 * needle).repeat_interleave(G, 1)[:, :, None]
    if name in PRE:  # the needle is one before rotation, and so is the query
        turn = rotary()
        k = turn.rotate(k, torch.arange(width))
        asked = turn.rotate(asked, at if name == "shadowkv" else newest)
    q[:, :, newest:] = asked
    _, layer = run(MADE[name](40), name, k, v, q, newest)
    pos, read = known(layer).state["chosen"], known(layer).read
    assert bool((pos == at).any(-1).all())
    assert read is not None and int(read.amax()) <= (width if name == "tidal" else 40)


@EACH
def test_slots_are_never_read_twice_and_empty_ones_never(name: str) -> None:
    k, v, q = tokens(64)
    valid = torch.ones(B, 60, dtype=torch.bool)
    valid[1, :23] = False
    _, layer = run(MADE[name](24), name, k, v, q, 60, valid)
    pos = known(layer).state["chosen"]
    for row in pos.flatten(0, 1).tolist():
        real = [each for each in row if each >= 0]
        assert len(real) == len(set(real))
    assert bool(((pos[1] < 0) | (pos[1] >= 23)).all())


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


@EACH
def test_a_fork_and_its_parent_go_their_own_ways(name: str) -> None:
    k, v, q = tokens(90)
    chooser = MADE[name](30)
    _, layer = run(chooser, name, k, v, q, 80)
    before = known(layer)
    kept = {key: value.clone() for key, value in before.slots.items()}
    other = layer.fork()
    assert known(other) is before
    other.write(k[:, :, :1], v[:, :, :1])
    chooser.views(Query(q[:, :, :1], other.seen - 1, 0.25), other, [other])
    assert known(layer) is before and known(other).at == other.seen - 1
    assert all(torch.equal(before.slots[key], value) for key, value in kept.items())


@EACH
def test_rolling_back_forgets_and_rows_follow(name: str) -> None:
    k, v, q = tokens(90)
    chooser = MADE[name](30)
    _, layer = run(chooser, name, k, v, q, 86)
    want = layer.fork()
    query = Query(q[:, :, :1], 90, 0.25)
    want.write(k[:, :, :1], v[:, :, :1])
    expected = attend(query, chooser.views(query, want, [want]))
    layer.mark()
    layer.write(k[:, :, 3:6], v[:, :, 3:6])
    chooser.views(Query(q[:, :, 3:6], 90, 0.25), layer, [layer])
    layer.rollback(3)
    layer.rows(torch.tensor([1, 1]))
    layer.write(*(x[1:, :, :1].expand(2, -1, -1, -1) for x in (k, v)))
    query = Query(q[1:, :, :1].expand(2, -1, -1, -1), 90, 0.25)
    found = attend(query, chooser.views(query, layer, [layer]))
    torch.testing.assert_close(found[0], expected[1], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=2e-6, rtol=1e-5)


def test_slots_read_are_counted() -> None:
    k, v, q = tokens(90)
    _, layer = run(MADE["quest"](30), "quest", k, v, q, 80)
    assert slots_read([layer, KVLayer()]).tolist()[0] <= 30
    assert slots_read([layer])[0] >= 10


def test_top_takes_as_many_as_there_is_room_for_whatever_the_ties() -> None:
    score = torch.tensor([[[[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 9.0]]]])
    free = torch.tensor([[[True, True, True, True, False]]])
    assert top(score[:, :, :1], free, torch.tensor([[2]])).tolist() == [[[0, 0, 1, 1, 0]]]
    assert top(score, free, torch.tensor([[1]])).tolist() == [[[0, 0, 0, 1, 0]]]
    assert top(score, free, torch.tensor([[9]])).tolist() == [[[1, 1, 1, 1, 0]]]
    assert not top(score, free, torch.tensor([[0]])).any()


def test_fill_takes_whole_blocks_that_fit_and_the_best_one_always() -> None:
    score = torch.tensor([[[[5.0, 4.0, 3.0, 2.0]]]])
    size = torch.tensor([[[6, 3, 0, 1]]])
    for room, want in ((6, [1, 0, 0, 0]), (9, [1, 1, 0, 0]), (10, [1, 1, 0, 1]), (2, [1, 0, 0, 0])):
        assert fill(score, size, torch.tensor([[room]])).tolist() == [[want]], room
    assert not fill(score, size, torch.tensor([[0]])).any()
