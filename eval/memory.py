"""Bytes that every method holds at every site, beside the closed formula."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

import diffcache
from diffcache.eval.loop import Loop
from diffcache.eval.record import Setting
from diffcache.eval.tiny import Shape, build, inputs
from diffcache.features.base import Method
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock
from diffcache.features.interval import Interval
from diffcache.features.taylorseer import TaylorSeer

SITES = ("model", "stack", "block", "attention", "feed-forward", "module")
_CHANNELS_OUT = 16
_STEPS = 8  # enough for every order to be reached


def elements(site: str, shape: Shape) -> tuple[str, int]:
    """Return how many numbers one feature of a site holds on FLUX: as a formula, and counted.

    `T` is the number of text and picture tokens together, `D` the width, `n` and `m` the double
    and the single blocks, all for a batch of one; a stream of a list is one feature.
    """
    tokens, width = shape.image_tokens + shape.text_tokens, shape.width
    n, m = shape.double, shape.single
    return {
        "model": ("T_image C", shape.image_tokens * _CHANNELS_OUT),
        "stack": ("2 T D", 2 * tokens * width),
        "block": ("(n + m) T D", (n + m) * tokens * width),
        "attention": ("(n + m) T D", (n + m) * tokens * width),
        "feed-forward": ("(n + 4 m) T D", (n + 4 * m) * tokens * width),
        "module": ("(2 n + m) T D", (2 * n + m) * tokens * width),
    }[site]


@dataclass(frozen=True)
class Case:
    """One method and what it should hold.

    Attributes:
        name: Name in the table.
        method: The method.
        formula: Numbers held for a batch of one; `b` is the number of guidance branches.
        a_branch: Numbers that every branch holds, counted.
        shared: Numbers that are held once: the probe of a gate, of the branch that decides.
    """

    name: str
    method: Method
    formula: str
    a_branch: int
    shared: int = 0


def cases(shape: Shape) -> list[Case]:
    """Return every method at every site."""
    found: list[Case] = []
    for site in SITES:
        formula, count = elements(site, shape)
        found.append(Case(f"Interval {site}", Interval(2, site=site), f"b {formula}", count))
        for order in (1, 2):
            method = TaylorSeer(2, order, warmup=3, site=site)
            name, factors = f"TaylorSeer order {order} {site}", order + 1
            found.append(Case(name, method, f"{factors} b {formula}", factors * count))
    probe = shape.image_tokens * shape.width
    stream = (shape.image_tokens + shape.text_tokens) * shape.width
    gated = ConfidenceGatedTaylor(1e-9, order=1, probe_order=2)
    formula = "2 b T D + 3 T_image D"
    found += [
        Case("FirstBlock", FirstBlock(1e-9), "b 2 T D + T_image D", 2 * stream, probe),
        Case("ConfidenceGatedTaylor order 1, 2", gated, formula, 2 * stream, 3 * probe),
    ]
    return found


def measure(setting: Setting, *, shape: Shape | None = None) -> dict[str, Any]:
    """Compare held bytes with the formula, for one guidance branch and for two, and after a reset.

    Args:
        setting: Device and dtype.
        shape: Sizes of the model.
    """
    shape = shape or Shape(double=3, single=5, batch=2)
    started = time.monotonic()
    model = build(shape, setting.device, setting.dtype)
    call = inputs(shape, setting.device, setting.dtype)
    rows = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(shape):
            for branches in (("cond",), ("cond", "uncond")):
                with Loop(model, case.method, call) as loop:
                    loop.take(_STEPS, branches)
                    held = diffcache.report(loop).held_bytes
                    diffcache.reset(loop)
                    after = diffcache.report(loop).held_bytes
                numbers = shape.batch * (len(branches) * case.a_branch + case.shared)
                expected = numbers * setting.dtype.itemsize
                rows.append({
                    "name": case.name, "method": repr(case.method), "branches": len(branches),
                    "formula": case.formula, "expected_bytes": expected, "held_bytes": held,
                    "after_reset_bytes": after, "equal": held == expected and after == 0,
                })  # fmt: skip
    return {
        "shapes": {
            "device": setting.device.type,
            "model": "tiny FLUX, random weights",
            **asdict(shape),
        },
        "rounds": 1,
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
    }


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the record as tables."""
    shape = record["shapes"]
    title = (
        f"bytes held: FLUX of n={shape['double']}, m={shape['single']} blocks, "
        f"D={16 * shape['heads']}, T={shape['image_tokens']}+{shape['text_tokens']}, "
        f"C={_CHANNELS_OUT}, batch {shape['batch']}, {record['dtype']}"
    )
    table = Table(
        "method", "branches", "formula", "expected", "held", "after reset", "", title=title
    )
    for row in record["rows"]:
        table.add_row(
            row["name"], str(row["branches"]), row["formula"], f"{row['expected_bytes']:,}",
            f"{row['held_bytes']:,}", f"{row['after_reset_bytes']:,}",
            "equal" if row["equal"] else "DIFFERS",
        )  # fmt: skip
    return [table]
