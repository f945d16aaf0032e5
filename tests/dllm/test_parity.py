"""Every policy and model beside a derivation without our code, as the table of docs/diffusion_lm.md.

`python -m tests.dllm.test_parity` runs all comparisons and prints it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from diffcache.registry import rows_of
from tests.dllm import test_block_causal as blocks
from tests.dllm import test_d2_cache as d2
from tests.dllm import test_dllm_cache as dllm
from tests.dllm import test_elastic_cache as elastic
from tests.dllm import test_oracle as oracle
from tests.dllm import test_remote as remote
from tests.dllm import test_sparse_dllm as sparse
from tests.dllm.cases import CASES, ROW_PLANS
from tests.dllm.toys import Compared

HEAD = "| policy, as the tests name it | model | text | forwards | token-layers | logits |\n|---|---|---|---|---|---|"
PAGE = (Path(__file__).parents[2] / "docs/diffusion_lm.md").read_text()
RUNS: dict[tuple[str, str], Callable[[], Compared | dict[str, Compared]]] = {
    **{(f"`{CASES[name].policy.name}` {name}", "Llama"): partial(oracle.compared, name) for name in ROW_PLANS},
    **{(f"`d2cache` {name}", "Llama"): partial(d2.compared, name) for name in d2.CASES},
    **{(f"`dllm-cache` {dllm.name(x)}", "Llama"): partial(dllm.compared, x) for x in dllm.SETTINGS},
    **{(f"`elastic` {name}", "Llama"): partial(elastic.compared, name) for name in elastic.SETTINGS},
    ("`sparse-dllm`", "Llama"): partial(sparse.compared, "sparse"),
}
for code, model in {"llada": "LLaDA", "dream": "Dream"}.items():
    for name, policy in remote.POLICIES.items():
        RUNS[f"`{policy.name}` {name}", model] = partial(remote.compared, code, name)
for code, model in {"llada2": "LLaDA2", "sdar": "SDAR", "fast-dllm": "Fast-dLLM v2"}.items():
    for dtype in (torch.float32, torch.float64):
        RUNS[str(dtype), model] = partial(blocks.compared, code, dtype)


def lines(run: tuple[str, str]) -> list[str]:
    """Return the lines of a run, which raises where rows, logits or what is held differ."""
    (label, model), found = run, RUNS[run]()
    told = {label: found} if isinstance(found, Compared) else {f"`{name}`": one for name, one in found.items()}
    made = []
    for name, one in told.items():
        text = {True: "equal", False: "differs", None: "forced"}[one.text]
        logits = "below 1e-12" if one.logits < 1e-12 else f"{one.logits:.0e}"  # others round otherwise
        made.append(f"| {name} | {model} | {text} | {one.forwards} | {one.tokens:,} | {logits} |")
    return made


@pytest.mark.parametrize("run", RUNS, ids=", ".join)
def test_the_page_tells_what_was_compared(run: tuple[str, str]) -> None:
    for line in lines(run):
        assert "differs" not in line and line in PAGE


def test_the_page_has_every_policy_and_nothing_else() -> None:
    _, _, table = PAGE.partition(HEAD)
    told = [line.split("`")[1] for line in table.strip().split("\n\n")[0].splitlines()]
    assert set(told) == {*rows_of("dllm"), "no cache"} and len(told) == len(RUNS) - 6 + 5 * 3


if __name__ == "__main__":
    print(HEAD)
    for one in RUNS:
        print("\n".join(lines(one)), flush=True)
