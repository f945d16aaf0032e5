"""`docs/diffusion_lm.md` behind its introduction: the policies, and what was measured of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.eval.workshop.dllm.replay import AGES
from diffcache.eval.workshop.dllm.replay import lines as replay_lines
from diffcache.eval.workshop.method_page import section
from diffcache.files import read_json
from diffcache.registry import rows_of

PAGE = Path("docs/diffusion_lm.md")
HEAD = "## Policies\n"  # what stands before is written by hand
TITLES: Mapping[str, str] = {
    "chain-llada": "128 steps of an automaton of 8 states",
    "chain-llada-probe": "48 steps of an automaton of 16 states, where a stale token shows at once",
    "chain-llada-walk": "a walk of 48 steps, where staleness shows by degrees",
}

MEASURED = """\
## Measured

Every row answers the same held-out prompts. *Exact match* is the share of answers that are right
from the first token to the last (Wilson's 95 % interval); *change* is the paired difference to the
uncached row that decodes in the same order (95 %, Bonett and Price 2012). *Token-layers* are the
rows that all layers computed for one answer, at batch 1, *fewer* how many times fewer than
uncached; those of a guide count. *Faster* is the time of uncached decoding, one token a step,
by the row's: medians of answers taken in turn in one process, most of it the sampler's where fewer
steps are taken. *The cache's share* of it is the time of the row that it is compared with by its
own. Below 1, the cache's own work in every layer takes longer than the rows that it saves on a
model this small. Rows in *italics* are controls, which are built to lose. The host time of a step
was lowered since, and is still more than a plain forward of as many rows takes. At commit e72033c,
CPU seconds in turn on a busy machine, batch 1, 16 answers (medians, quartiles in brackets), 8 steps
after the first on chain-llada: uncached 1.17 (1.11 to 1.20), dKV-Cache PD 1.54 (1.48 to 1.65),
Fast-dLLM dual 1.56 (1.43 to 1.78), Elastic-Cache never 2.16 (2.04 to 2.19) and by keys 2.40 (2.21
to 2.54), d2Cache 2.27 (2.11 to 2.34). Four steps with 28 M parameters and random weights: dKV-Cache
PD 1.24 (1.22 to 1.28), Fast-dLLM dual 1.24 (1.22 to 1.28), Elastic-Cache never 1.42 (1.39 to 1.44),
d2Cache 1.40 (1.38 to 1.42). `python -m diffcache.eval.workshop.bench dllm-steps` measures whole
answers.

With `DiffusionLM(..., compiled=True)` a step takes, by the same plain forward, which is not
compiled (whole answers of chain-llada at batch 1, 16 of them after one that compiles): dKV-Cache
decode 1.11 (1.07 to 1.15), PD 1.08 (1.05 to 1.14), FreeCache 1.04 (0.98 to 1.08), Window-Diffusion
1.10 (1.03 to 1.24), all at a draft of commit e4fbc35; Fast-dLLM dual 0.99 (0.93 to 1.06), d2Cache
1.48 (1.41 to 1.53), at that commit. Answers then come 1.7, 1.8, 1.9, 2.5, 2.7 and 1.5 times faster
than uncached ones. A graph takes 25 to 70 seconds to compile on that machine. Logits differed by at
most 3e-5 where the largest is 13. Fast-dLLM dual takes 1.19 (1.15 to 1.23) in batches of 8, and
0.92 (0.91 to 0.94) with 28 M parameters, a prompt of 384 and an answer of 16 tokens. `bench
dllm-steps-compiled` measures it.

What is left of a step, in milliseconds (one answer of chain-llada, batch 1, not compiled; the plain
forward of as many rows in brackets): Elastic-Cache never 4.7 (2.9) in the call, 0.5 in the commit,
0.1 in the plan; d2Cache 6.0 (3.6), 0.4 and 0.7; Fast-dLLM dual 3.8 (3.1), 0.4 and 0.1. In the calls
it is attention to all 258 keys instead of the rows' own (44 microseconds a layer, 13 of the rows
alone), and for Elastic-Cache and d2Cache the weights of attention once more (49), which torch's
fused attention does not hand out. With 28 M parameters these are 258, 30 and 241 microseconds of a
layer. Elastic-Cache is not compiled, as the host waits for the outcome of each layer's test.

Rows that the tables below do not have yet, of 400 prompts of chain-llada-probe, whose guide is too
small for it (exact match with Wilson's 95 % interval, forwards, token-layers; commit 8b38714): the
guide alone 0.350 (0.305 to 0.398), 48.0, 97; uncached and guided 0.948 (0.921 to 0.965), 13.4,
4,110; guided FreeCache with its commit forward 0.943 (0.915 to 0.961), 13.5, 1,650; guided
Fast-dLLM dual 0.943 (0.915 to 0.961), 13.4, 1,558; uncached in a quarter of the steps 0.005 (0.001
to 0.018) and in an eighth 0.000 (0.000 to 0.010); Sparse-dLLM 0.890 (0.856 to 0.917), 48.0, 3,780.
"""
REPLAYED = """\
## Errors on one trajectory

A cache that decides one token otherwise decodes another text from there on. Here every step has the
tokens of the uncached run, and the cache is only asked. *Same masks* is the share of computed masks
of the block whose most probable token is the uncached one, *same commits* that of the tokens that
were decided. The other columns are relative errors of keys and values in the layers after the
first, by the steps since all rows were computed.
"""


def page(directory: Path = ROOT) -> str:
    """Return the whole page.

    Args:
        directory: The project, for its record and the introduction of the page.
    """
    introduction, _, _ = (directory / PAGE).read_text(encoding="utf-8").partition(HEAD)
    parts = [introduction + HEAD, *map(section, rows_of("dllm").values())]
    folder = directory / "assets" / "bench"
    records = [read_json(folder / f"dllm-{model}.json") for model in TITLES]
    records = [record for record in records if record]
    if records:
        parts += [MEASURED, *map(_measured, records)]
        parts += [REPLAYED, *map(_replayed, records)]
    return "\n".join(parts).rstrip() + "\n"


def _measured(record: Mapping[str, Any]) -> str:
    """Return the table of a model."""
    shapes, rows = record["shapes"], record["rows"]
    about = (
        f"{TITLES[shapes['model']].capitalize()}; blocks of {shapes['block']}, "
        f"{shapes['samples']} prompts, {record['dtype']}, {record['threads']} thread, "
        f"{record['device']} (`{record['command']}`)."
    )
    heads = [
        "",
        "exact match",
        "change",
        "against",
        "forwards",
        "token-layers",
        "fewer",
        "faster, batch 1",
        "the cache's share",
        f"batch {shapes['batch']}",
        "the cache's share",
    ]
    known = {row["name"]: row for row in rows}
    lines = table(heads, [_row(row, known, shapes["batch"]) for row in rows])
    return "\n".join([f"### {shapes['model']}\n", about, "", *lines, ""])


def _row(row: Mapping[str, Any], known: Mapping[str, Any], batch: int) -> list[str]:
    name = f"*{row['name']}*" if row["role"] == "control" else row["name"]
    one, whole = row["batch_1"], known["uncached"]["batch_1"]["token_layers"]
    share = "{value:.3f} ({low:.3f} to {high:.3f})".format(**row["exact_match"])
    change = row["change"]
    return [
        name,
        share,
        "" if change is None else "{value:+.3f} ({low:+.3f} to {high:+.3f})".format(**change),
        "" if change is None else row["against"],
        f"{one['forwards']:.1f}",
        f"{one['token_layers']:,.0f}",
        f"{whole / one['token_layers']:.2f}",
        *_faster(row, known, "batch_1"),
        *_faster(row, known, f"batch_{batch}"),
    ]


def _faster(row: Mapping[str, Any], known: Mapping[str, Any], batch: str) -> tuple[str, str]:
    """Return how many times faster a row is than uncached, and the cache's own share of it."""
    faster = row[batch]["faster"]["median"]
    against = known[row["against"]][batch]["faster"]["median"]
    is_cache = row["role"] != "baseline"
    return f"{faster:.2f}", f"{faster / against:.2f}" if is_cache else ""


def _replayed(record: Mapping[str, Any]) -> str:
    """Return the table of the errors on the uncached run's own trajectory."""
    heads = ["", "same masks", "same commits", *(f"age {age}" for age in AGES)]
    lines = table(heads, replay_lines(record["replay"]))
    return "\n".join([f"### {record['shapes']['model']}, replayed\n", *lines, ""])


main = keep_pages(lambda text: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())
