"""Walking nested payloads, counting storages once, tables of shared rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.codec.base import Exact, nbytes, tensors
from diffcache.kv.codec.table import SlotTable, compact, join_tables


@dataclass(frozen=True)
class Box:
    left: object
    right: object = None
    count: int = 3


def test_every_tensor_is_walked_once() -> None:
    a, b, c = torch.zeros(2), torch.ones(3), torch.ones(4)
    found = list(tensors(Box((a, [b, a]), {"x": Box(c, b), "y": 1.5, "z": None})))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]
    assert list(tensors("nothing")) == []


def test_a_storage_counts_once_and_whole() -> None:
    big = torch.zeros(100, dtype=torch.float32)
    assert nbytes([big, big[:3], big.view(10, 10)]) == 400
    assert nbytes([big[:3]]) == 400
    assert nbytes([big, torch.zeros(5, dtype=torch.uint8)]) == 405
    assert nbytes([torch.zeros(0), torch.zeros(0)]) == 0


def test_exact_shares_a_whole_tensor_and_copies_a_part() -> None:
    x = torch.randn(1, 2, 8, 4)
    assert Exact().encode(x).values.data_ptr() == x.data_ptr()
    assert nbytes(Exact().encode(x[:, :, :2])) == 2 * 2 * 4 * 4
    assert nbytes(Exact(torch.float16).encode(x)) == x.nbytes // 2


def rows_of(table: SlotTable) -> Tensor:
    return table.lookup()


def test_runs_need_no_row_numbers() -> None:
    table = SlotTable(torch.arange(6.0).reshape(1, 1, 3, 2), 2)
    assert rows_of(table)[0, 0, :, 0].tolist() == [0, 0, 2, 2, 4, 4]
    later = table.take(torch.tensor([[[4, 5, 1, 0]]]))  # whole runs, in any order
    assert later.of is None and rows_of(later)[0, 0, :, 0].tolist() == [4, 4, 0, 0]
    assert table.take(torch.tensor([[[2, 3, 2]]])).of is None  # one run of three


def test_rows_that_nobody_uses_are_dropped() -> None:
    table = SlotTable(torch.arange(8.0).reshape(1, 2, 4, 1), 2)
    some = table.take(torch.tensor([[[0, 7, 1], [2, 3, 2]]]))
    assert some.values.shape[2] == 2 and some.of is not None and some.of.dtype == torch.uint8
    assert rows_of(some)[0, :, :, 0].tolist() == [[0, 3, 0], [5, 5, 5]]


def test_row_numbers_grow_wider_only_where_they_must() -> None:
    for rows, dtype in ((256, torch.uint8), (257, torch.int16), (32769, torch.int32)):
        table = SlotTable(torch.arange(float(rows)).reshape(1, 1, rows, 1), 2)
        every = torch.arange(2 * rows).flip(0).roll(1)[None, None]
        found = table.take(every)
        assert found.of is not None and found.of.dtype == dtype
        assert torch.equal(rows_of(found)[0, 0, :, 0].long(), every[0, 0] // 2)


def test_one_row_for_all_stays_one_row() -> None:
    row = torch.randn(2, 3, 5)
    joined = join_tables([SlotTable.single(row, 4), SlotTable.single(row.clone(), 3)])
    assert joined.values.shape[2] == 1 and joined.each == 7
    apart = join_tables([SlotTable.single(row, 4), SlotTable.single(row + 1, 3)])
    wanted = torch.cat([row[:, :, None].expand(2, 3, n, 5) + i for i, n in enumerate((4, 3))], 2)
    assert torch.equal(apart.lookup(), wanted)


def test_one_row_taken_often_stays_one_row() -> None:
    table = SlotTable.single(torch.randn(1, 2, 3), 4)
    twice = table.take(torch.arange(4).repeat(2).expand(1, 2, -1))
    assert twice.values.shape[2] == 1 and twice.each == 8 and twice.of is None
    mixed = join_tables([SlotTable.single(torch.randn(1, 2, 3), 1), table])
    some = mixed.take(torch.tensor([[[0, 2, 3, 1], [1, 1, 0, 4]]]))
    assert some.values.shape[2] == 2  # a row for each slot would be four


def test_compact_numbers_what_is_used() -> None:
    order, of = compact(torch.tensor([[[5, 2, 5], [0, 1, 2]]]), 6)
    assert order[0, 1].tolist() == [0, 1, 2] and order[0, 0, :2].tolist() == [2, 5]
    assert of.tolist() == [[[1, 0, 1], [0, 1, 2]]]
