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
    "chain-block": "47 steps of the automaton of 16 states, with attention that is causal over blocks",
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
model this small. Rows in *italics* are controls, which are built to lose. Quartiles are in brackets.
"""
# Name of a bench of steps -> the head of its column.
STEPS: Mapping[str, str] = {
    "dllm-steps": "batch 1",
    "dllm-steps-8": "batch 8",
    "dllm-steps-compiled": "compiled, batch 1",
    "dllm-steps-compiled-8": "compiled, batch 8",
}
STEP = """\
## Time of a step

A step with its plan and commit, by a plain forward of as many rows on the same model without a
cache, which is never compiled. Wanted was at most 1.3. CPU seconds of whole answers in turn in one
process, after one that is not counted: medians, with quartiles in brackets. `compiled` is
`DiffusionLM(..., compiled=True)`; a graph takes 25 to 70 seconds to compile, and logits differ by at
most 3e-5 where the largest is 13. Elastic-Cache by heads drifts at nearly every step here; the layers
after a drift run once more, not compiled. With 28 M parameters (8 layers of 512 channels, random
weights, a prompt of 384 and an answer of 16 tokens) Fast-dLLM dual, compiled, took 0.92 (0.91 to 0.94)
at a draft of commit e4fbc35; the others were not measured there.

What is left of a step, in milliseconds (one answer of chain-llada, batch 1, not compiled, at commit
d9829ec2; the plain forward of as many rows in brackets): Elastic-Cache never 4.7 (2.9) in the call, 0.5
in the commit, 0.1 in the plan; d2Cache 6.0 (3.6), 0.4 and 0.7; Fast-dLLM dual 3.8 (3.1), 0.4 and 0.1. In
the calls it is attention to all 258 keys instead of the rows' own (44 microseconds a layer, 13 of the
rows alone), and for Elastic-Cache and d2Cache the weights of attention once more (49), which torch's
fused attention does not hand out. With 28 M parameters these are 258, 30 and 241 microseconds of a
layer.
"""
FASTER = """\
How many times faster each decodes the same answers than the model without a cache.
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
        parts += [REPLAYED, *(_replayed(record) for record in records if record["replay"])]
    steps = {name: read_json(folder / f"{name}.json") for name in STEPS}
    parts += _steps({name: record for name, record in steps.items() if record})
    return "\n".join(parts).rstrip() + "\n"


def _steps(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what a step takes in each record, and how much faster answers come."""
    if not records:
        return []
    kept = {name: {row["name"]: row for row in record["rows"]} for name, record in records.items()}
    policies = list(dict.fromkeys(policy for rows in kept.values() for policy in rows))
    heads = ["", *(STEPS[name] for name in records)]

    def drawn(key: str) -> list[str]:
        lines = [[policy, *(_middle(rows.get(policy), key) for rows in kept.values())] for policy in policies]
        return [*table(heads, lines), ""]

    said = [
        f"{STEPS[name]}: n = {record['rounds']} batches of {record['shapes']['batch']}, {record['threads']} thread, "
        f"{record['device']}, commit `{record['commit']}` (`{record['command']}`)"
        for name, record in records.items()
    ]
    return [STEP, *drawn("step_ratio"), FASTER, *drawn("faster"), "; ".join(said) + ".", ""]


def _middle(row: Mapping[str, Any] | None, key: str) -> str:
    """Return the median of a row's numbers with its quartiles; nothing of a row that is not there."""
    return "{median:.2f} ({q1:.2f} to {q3:.2f})".format(**row[key]) if row else ""


def _measured(record: Mapping[str, Any]) -> str:
    """Return the table of a model."""
    shapes, rows = record["shapes"], record["rows"]
    about = (
        f"{TITLES[shapes['model']].capitalize()}; blocks of {shapes['block']}, "
        f"{shapes['samples']} prompts, {record['rounds']} timed at batch 1 and {max(1, record['rounds'] // 4)} "
        f"batches of {shapes['batch']}, {record['dtype']}, {record['threads']} thread, {record['device']}, "
        f"commit `{record['commit']}` (`{record['command']}`)."
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
    return _middle(row[batch], "faster"), f"{faster / against:.2f}" if is_cache else ""


def _replayed(record: Mapping[str, Any]) -> str:
    """Return the table of the errors on the uncached run's own trajectory."""
    heads = ["", "same masks", "same commits", *(f"age {age}" for age in AGES)]
    lines = table(heads, replay_lines(record["replay"]))
    return "\n".join([f"### {record['shapes']['model']}, replayed\n", *lines, ""])


main = keep_pages(lambda text: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())
