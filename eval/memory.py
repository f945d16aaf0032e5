"""Bytes that every method holds at every site, beside the closed formula."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

import diffcache
from diffcache.eval.loop import Loop
from diffcache.eval.record import Setting
from diffcache.eval.tiny import Shape, build, inputs
from diffcache.features.base import FeatureMethod
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock
from diffcache.features.interval import Interval
from diffcache.features.taylorseer import TaylorSeer

SITES = ("model", "stack", "block", "attention", "feed-forward", "module")
_CHANNELS_OUT = 16
_STEPS = 12  # enough for every order to be reached


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


def cases(shape: Shape) -> list[tuple[FeatureMethod, str, int]]:
    """Return methods with the formula of what they hold, and its value in numbers."""
    found: list[tuple[FeatureMethod, str, int]] = []
    for site in SITES:
        formula, count = elements(site, shape)
        found.append((Interval(2, site=site), formula, count))
        for order in (1, 2):
            method = TaylorSeer(2, order, warmup=3, site=site)
            found.append((method, f"{order + 1} x {formula}", (order + 1) * count))
    probe = shape.image_tokens * shape.width
    stream = (shape.image_tokens + shape.text_tokens) * shape.width
    found.append((FirstBlock(1e-9), "2 T D + T_image D", 2 * stream + probe))
    gated = ConfidenceGatedTaylor(1e-9, order=1, probe_order=2)
    found.append((gated, "2 x T D + 3 x T_image D", 2 * stream + 3 * probe))
    return found


def measure(setting: Setting, *, shape: Shape | None = None) -> dict[str, Any]:
    """Compare held bytes with the formula, for one guidance branch and for two, and after a reset.

    Args:
        setting: Device and dtype.
        shape: Sizes of the model.
    """
    shape = shape or Shape(double=4, single=8, heads=4, image_tokens=64, text_tokens=24, batch=4)
    started = time.monotonic()
    model = build(shape, setting.device, setting.dtype)
    call = inputs(shape, setting.device, setting.dtype)
    rows = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method, formula, count in cases(shape):
            for branches in (("cond",), ("cond", "uncond")):
                with Loop(model, method, call) as loop:
                    loop.take(_STEPS, branches)
                    held = diffcache.report(loop).held_bytes
                    diffcache.reset(loop)
                    after = diffcache.report(loop).held_bytes
                size = setting.dtype.itemsize
                expected = _expected(method, count, shape, len(branches)) * size
                rows.append({
                    "name": repr(method), "branches": len(branches), "formula": formula,
                    "expected_bytes": expected, "held_bytes": held, "after_reset_bytes": after,
                    "equal": held == expected and after == 0,
                })  # fmt: skip
    return {
        "shapes": {"device": setting.device.type, "model": "tiny FLUX, random weights", **asdict(shape)},
        "rounds": 1,
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
    }


def _expected(method: FeatureMethod, count: int, shape: Shape, branches: int) -> int:
    """Return the numbers that all branches hold; a gate's probe is of the deciding branch alone."""
    probe = 0
    if isinstance(method, FirstBlock):
        probe = shape.image_tokens * shape.width
    elif isinstance(method, ConfidenceGatedTaylor):
        probe = (method.probe_order + 1) * shape.image_tokens * shape.width
    return shape.batch * (branches * (count - probe) + probe)


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the record as tables."""
    shape = record["shapes"]
    title = (
        f"bytes held: FLUX of n={shape['double']}, m={shape['single']} blocks, D={16 * shape['heads']}, "
        f"T={shape['image_tokens']}+{shape['text_tokens']}, batch {shape['batch']}"
    )
    table = Table("method", "branches", "formula", "expected", "held", "after reset", "", title=title)
    for row in record["rows"]:
        table.add_row(
            row["name"], str(row["branches"]), row["formula"], f"{row['expected_bytes']:,}",
            f"{row['held_bytes']:,}", f"{row['after_reset_bytes']:,}",
            "equal" if row["equal"] else "DIFFERS",
        )  # fmt: skip
    return [table]
