"""`docs/diffusion_lm.md` behind its introduction: the policies, and what was measured of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diffcache.eval.pages import keep_pages, rendered
from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.workshop.method_page import behind_policies, marked
from diffcache.files import read_json

Record = Mapping[str, Any]
PAGE = Path("docs/diffusion_lm.md")
AGES = (0, 1, 2, 4, 8, 16, 32)  # steps since all rows were computed, of the table
MODELS: Mapping[str, str] = {
    "chain-llada": "128 steps of an automaton of 8 states",
    "chain-llada-probe": "48 steps of an automaton of 16 states, where a stale token shows at once",
    "chain-llada-walk": "a walk of 48 steps, where staleness shows by degrees",
    "chain-block": "47 steps of the automaton of 16 states, with attention that is causal over blocks",
}
# Name of a bench of steps -> the head of its column.
STEPS: Mapping[str, str] = {
    "dllm-steps": "batch 1",
    "dllm-steps-8": "batch 8",
    "dllm-steps-compiled": "compiled, batch 1",
    "dllm-steps-compiled-8": "compiled, batch 8",
}


def page() -> str:
    """Return the whole page."""
    records = [read_json(FOLDER / f"dllm-{model}.json") for model in MODELS]
    timed = {name: read_json(FOLDER / f"{name}.json") for name in STEPS}
    told = rendered(
        "workshop/dllm/page.md.jinja",
        records=[{**one, "rows": list(_rows(one)), "replayed": list(_replayed(one))} for one in records],
        steps={key: _steps(timed, key) for key in ("step_ratio", "faster")},
        timed=timed,
        titles={**MODELS, **STEPS},
        ages=[[f"age {age}", f"{{age_{age}:.3f}}"] for age in AGES],
        heads=[["", "{name}"], *([title, f"{{{name}:.2f}}"] for name, title in STEPS.items())],
    )
    return behind_policies(ROOT / PAGE, "dllm", told)


def _rows(record: Record) -> Iterator[Record]:
    """Yield rows with how many fewer token-layers they take, and what share of the speed is the cache's."""
    known = {row["name"]: row for row in record["rows"]}
    whole = known["uncached"]["batch_1"]["token_layers"]
    for row, shown in zip(record["rows"], marked(record["rows"]), strict=True):
        shares = {
            f"share_{size}": row[f"batch_{size}"]["faster"]["median"]
            / known[row["against"]][f"batch_{size}"]["faster"]["median"]
            if row["role"] != "baseline"
            else None
            for size in (1, 8)
        }
        against = None if row["change"] is None else row["against"]
        yield {**shown, **shares, "against": against, "fewer": whole / row["batch_1"]["token_layers"]}


def _replayed(record: Record) -> Iterator[Record]:
    """Yield the rows of the errors on the uncached run's own trajectory."""
    for name, row in record["replay"].items():
        yield {**row, "name": name} | {f"age_{age}": row["kv_error_by_age"].get(str(age)) for age in AGES}


def _steps(records: Mapping[str, Record], key: str) -> list[Record]:
    """Return a number of every policy in every record of steps, None where it has none."""
    kept = {name: {row["name"]: row[key] for row in record["rows"]} for name, record in records.items()}
    policies = dict.fromkeys(policy for rows in kept.values() for policy in rows)
    return [{"name": policy} | {name: rows.get(policy) for name, rows in kept.items()} for policy in policies]


main = keep_pages(lambda text: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())
