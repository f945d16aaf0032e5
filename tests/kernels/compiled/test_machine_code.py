"""The machine code of every kernel: nothing spills, shared memory fits, loads are wide."""

import re

import pytest

from diffcache.eval.kernels.cases import all_cases, products
from diffcache.eval.kernels.launch_options import ARCH, built, choices_of
from diffcache.eval.workshop.kernels import compile_targets, page
from diffcache.files import read_json
from diffcache.kernels.dispatch import OPERATORS
from diffcache.kernels.gpu.machine import SHARED, Machine, compiled, read
from tests.kernels.compiled.launches import LAUNCHES, Launch

WIDE = ("LDG.E.128", "LDGSTS", "UTMALDG")  # loads of 16 bytes, asynchronous ones, whole tiles
# Instructions of the longest loop on sm_90, with Triton 3.9, of every launch that has one.
LOOPS = {
    "attn_decode_kivi-4-128-128-torch.bfloat16": 1069,
    "attn_decode_kivi-8-32-128-torch.bfloat16": 927,
    "attn_decode_kivi-2-32-128-torch.float32": 1096,
    "attn_forward-dense-torch.bfloat16-128-4680": 522,
    "attn_forward-list-torch.bfloat16-128-16": 857,
    "attn_forward-list-torch.float32-128-1": 742,
    "attn_mass-list-torch.float32-128-1": 828,
    "attn_forward-turned-torch.bfloat16-128-4680": 611,
    "attn_mass-turned-torch.bfloat16-128-4680": 439,
    "attn_forward-hidden-torch.float16-64-4680": 788,
    "attn_forward-halves-torch.bfloat16-256-4680": 932,
    "attn_mass-halves-torch.bfloat16-256-4680": 344,
    "attn_forward-bytes-torch.bfloat16-128-4680": 475,
    "attn_forward-alone-torch.bfloat16-128-4608": 509,
    "attn_mass-alone-torch.bfloat16-128-4608": 602,
    "l1_sums-bfloat16": 131,
    "linear_of_codes-4608": 110,
    "linear_of_codes-64": 152,
    "linear_of_codes-16": 127,
    "rotate-half": 91,
    "rotate-interleaved": 88,
}
SAMPLE = {("kv_gather", "DeepSeek-V3"), ("linear_of_codes", "FLUX.1-dev")}
ARCHS = (80, 89, 100, 120, "gfx942")
LONGER = 1.15  # by which another version of the compiler may differ


@pytest.fixture(scope="module")
def machines() -> dict[str, Machine]:
    """Return the machine code of all launches by name: the disassembler runs once."""
    made = [compiled(one.kernel, 90, *one.args, **one.options) for one in LAUNCHES]
    return {one.name: code for one, code in zip(LAUNCHES, read(made, 90), strict=True)}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_machine_code(launch: Launch, machines: dict[str, Machine]) -> None:
    found = machines[launch.name]
    assert (found.stack, found.local) == (0, 0)
    assert found.shared <= SHARED[90]
    if launch.wide:
        assert any(found.count(name) for name in WIDE), sorted(set(found.instructions))
    if launch.products:
        assert found.count(launch.products)
    assert re.search(launch.text, found.text)
    assert max(found.loops, default=0) <= LONGER * LOOPS.get(launch.name, 0)


def test_the_record_is_what_is_compiled_here() -> None:
    """A sample of the record: products and none, of every architecture; all of it by the command."""
    known = {(row["operator"], row["model"]): row for row in read_json(page.CODE)["rows"]}
    sample = [c for c in all_cases() if (c.operator, c.model) in SAMPLE]
    assert len(sample) == len(SAMPLE)
    for case in sample:
        made, kept = compile_targets.row(case, ARCHS), known[case.operator, case.model]
        assert made["launches"] == kept["launches"]
        for arch in map(str, ARCHS):
            for launch, code, old in zip(made["launches"], made["targets"][arch], kept["targets"][arch], strict=True):
                assert not page.wrong(launch, code), arch
                assert bool(code["matrix"]) is code["wanted"]
                # another version of the compiler may use a few registers more
                assert code["registers"] <= 1.25 * old["registers"] and code["warps"]


def test_candidates_that_spill_or_do_not_fit_are_dropped():
    case = next(products())
    usual = built(case, {}, ARCH)
    assert usual.name == "default" and not usual.dropped and 0 < usual.used[0] < 256
    assert usual.used[1:] == (96, 0)
    spilling = built(case, {"COLUMNS": 256, "num_warps": 4}, ARCH)
    assert spilling.dropped == "spills" and spilling.used[2] > 0
    large = built(case, {"num_stages": 8}, ARCH)
    assert large.name == "num_stages=8" and "shared memory" in large.dropped and not large.options
    assert built(case, {"num_warps": 8}, ARCH).options == usual.options


def test_every_operator_has_options_to_try():
    assert [name for name in OPERATORS if not choices_of(name)] == []
