"""Expected times: work of a program by Triton's own form, instructions, occupancy, and the record."""

import pytest

from diffcache.eval.cost import expected
from diffcache.eval.cost.roofline import Device, Roofline
from diffcache.eval.kernels.tiles import tiles
from diffcache.eval.record import ROOT
from diffcache.eval.workshop.kernels import page
from diffcache.files import read_json

FOLDER = ROOT / "assets" / "bench"
# Two loops: one over `width`, in shares of the programs; one that only the first program turns.
TEXT = """
module {
  tt.func public @kernel(%q: !tt.ptr<bf16>, %width: i32) attributes {noinline = false} {
    %c64_i32 = arith.constant 64 : i32 loc(#loc3)
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %0 = tt.get_program_id x : i32 loc(#loc9)
    %1 = tt.get_num_programs x : i32
    %2 = arith.divsi %width, %c64_i32 : i32
    %3 = arith.divsi %2, %1 : i32
    %4 = arith.muli %0, %3 : i32
    %5 = arith.addi %4, %3 overflow<nsw> : i32
    %asked = tt.load %q : !tt.ptr<bf16>
    %6:2 = scf.for %turn = %4 to %5 step %c1_i32 iter_args(%a = %x, %b = %y) -> (tensor<16x64xf32>) : i32 {
      %key = tt.load %p, %m, %n : tensor<128x64x!tt.ptr<bf16>> loc(#loc1)
      %dot = tt.dot %q, %key, %c : tensor<16x128xbf16> * tensor<128x64xbf16> -> tensor<16x64xf32>
      scf.yield %dot, %b : tensor<16x64xf32>, tensor<16x64xf32>
    } loc(#loc2)
    %7 = arith.cmpi eq, %0, %c0_i32 : i32
    scf.if %7 {
      tt.store %o, %v : tensor<256x!tt.ptr<f8E4M3FN>>
    } else {
      tt.store %o, %v : tensor<128x!tt.ptr<f32>>
    }
    tt.return
  }
}
"""


def test_loops_turn_as_often_as_numbers_of_the_launch_say():
    found = tiles(TEXT, {"width": 64 * 40}, (4,))
    assert found.turns == [10.0] and found.rows == 16
    assert found.loaded == 10 * 128 * 64 * 2
    assert found.products == {"bf16": 10 * 2 * 16 * 128 * 64}
    assert found.stored == (256 + 3 * 128 * 4) / 4
    unknown = tiles(TEXT, {}, (1,))  # a bound that is loaded from memory counts once
    assert unknown.turns == [1.0]


def test_instructions_of_a_loop_count_as_often_as_it_turns():
    names = ["S2R", "LDG.E.128", "IADD3", "MUFU.EX2", "HMMA.16816", "BRA", "STG.E.64", "NOP"]
    found = expected.dynamic(names, [(1, 5)], [10.0])
    assert found == {"all": 52.0, "alu": 10.0, "xu": 10.0, "lsu": 42.0}
    assert expected.dynamic(names, [(1, 5), (6, 6)], [10.0])["all"] == 52.0


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [(32, 0, 4, 16), (168, 0, 8, 1), (90, 70, 4, 3), (255, 0, 1, 8), (16, 0, 1, 32)],
)
def test_blocks_of_a_multiprocessor(registers, shared, warps, blocks):
    code = {"registers": registers, "shared": shared, "warps": warps}
    assert expected.resident(code, expected.CHIPS["h200"]) == blocks


def test_most_rows_of_the_record_are_expected_near_what_was_measured():
    rows = read_json(page.CODE)["rows"]
    measured = {
        (row["operator"], row["model"], row["shapes"]): row["ways"]["kernel"]["us"][1]
        for row in read_json(FOLDER / "kernels.json")["rows"]
    }
    ratios = [
        expected.expect(row, "h200").us / measured[key]
        for row in rows
        if (key := (row["operator"], row["model"], row["shapes"])) in measured
    ]
    near = [ratio for ratio in ratios if 0.7 <= ratio <= 1.3]
    assert len(ratios) >= 35 and len(near) >= 0.8 * len(ratios)
    for row in rows:
        for device in expected.CHIPS:
            said = expected.expect(row, device)
            assert said.us >= said.parts["bytes"] > 0 and min(said.blocks) >= 1


def test_a_step_is_as_slow_as_its_host_or_its_device():
    import torch

    device = Device("mine", 100, 1000)
    with torch.device("meta"), Roofline(device) as spent:
        torch.empty(10**9, dtype=torch.bfloat16) + 1
    assert spent.operations == 1 and spent.seconds == 4e9 / 1e12
    assert spent.expected() == pytest.approx(4e-3 / 0.88 + 3.5e-6)
    assert spent.expected(sites=1000) == pytest.approx(0.1 + 5.4e-6)
