"""Records, runs and pages that the tests of reports are about."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffcache.eval.report.palette import Picture
from diffcache.eval.report.table import table_of

STEPS = 12


EVIL = '<script>alert("x")</script> a | red *circle* & a `square` for $5 or \\frac$6'


def interval(value: float, half: float, **more: Any) -> dict[str, Any]:
    return {"value": value, "low": value - half, "high": value + half, "n": 64, **more}


def row(name: str, kind: str, computed: int, damage: float, matches: list[str]) -> dict[str, Any]:
    """A row whose every number follows from the steps it computes and how much it damages."""
    method = f"{name.title().replace('-', '')}(every={STEPS // computed})"
    fidelity = {
        "psnr_db": interval(40 - damage, 0.4, p5=30 - damage, pooled=39 - damage),
        "ssim": interval(0.99 - damage / 100, 0.002, p5=0.9),
        "lpips_lite": interval(0.01 + damage / 100, 0.004, p95=0.2),
    }
    quality: dict[str, Any] = {
        "fid_lite": interval(3.0 + damage / 4, 0.3),
        "kid_lite": {"value": 0.001 + damage / 1000, "spread": 0.0002, "n": 64},
        "clip_score": interval(0.99 - damage / 200, 0.006),
    }
    if kind != "uncached":
        quality["fid_lite_change"] = interval(damage / 4, 0.5, paired=True)
        quality["fid_lite_to_uncached"] = {"value": damage / 3, "n": 64}
    marks = [step % (STEPS // computed) == 0 for step in range(STEPS)]
    return {
        "name": name,
        "kind": kind,
        "method": method if kind == "method" else None,
        "matches": matches,
        "steps": computed if kind == "fewer steps" else STEPS,
        "hash": name.encode().hex().ljust(16, "0")[-16:],
        "folder": f"cases/{re.sub('[^a-z0-9]+', '-', name)}",
        "evaluations": float(computed),
        "computed_steps": float(computed),
        "flops": 1e8 * computed,
        "flops_ratio": STEPS / computed,
        "held_bytes": 360_448 if kind == "method" else 0,
        "fidelity": {} if kind == "uncached" else fidelity,
        "quality": quality,
        "timeline": [{"step": s, "timestep": 1000.0 - 80 * s, "computed": float(m)} for s, m in enumerate(marks)]
        if kind == "method"
        else None,
        "latent_error": [damage * s / 1000 for s in range(STEPS)] if kind == "method" else None,
        "samples": {"count": 64, "worst": [1, 0], "median": [2], "best": [3]},
    }


def make_record(**task: Any) -> dict[str, Any]:
    """Build a record: uncached, three caches, and what they are to be compared with."""
    lite = {"unit": "", "backend": "lite", "extractor": "sticker-features", "sha256": "ab" * 32}
    exact = {"unit": "", "direction": "up", "backend": "exact"}
    rows = [
        row("uncached", "uncached", STEPS, 0.0, []),
        row("taylorseer", "method", 3, 1.5, []),
        row("first-block", "method", 4, 6.0, []),
        row("interval", "method", 6, 0.5, []),
        row("uncached, 3 steps", "fewer steps", 3, 9.0, ["taylorseer"]),
        row("uncached, 4 steps", "fewer steps", 4, 4.0, ["first-block", "interval"]),
    ]
    times = {r["name"]: 0.1 * r["evaluations"] for r in rows}
    return {
        "schema": "diffcache.eval/1", "command": "diffcache eval --model sticker-flux",
        "finished": True,
        "task": {
            "model": "sticker-flux", "model_sha256": "cd" * 32, "pipeline": "FluxPipeline",
            "kind": "pictures", "samples": 64, "seed": 0, "batch_size": 8, "steps": STEPS,
            "prompts": {"source": "held-out shapes", "count": 64, "sha256": "ef" * 32},
            "call": {"height": 64, "width": 64}, "dtype": "float32", **task,
        },
        "metrics": {
            "psnr_db": exact | {"title": "PSNR", "unit": "dB"}, "ssim": exact | {"title": "SSIM"},
            "lpips_lite": lite | {"title": "LPIPS-lite", "direction": "down"},
            "fid_lite": lite | {"title": "FID-lite", "direction": "down"},
            "fid_lite_change": lite | {"title": "FID-lite, change", "direction": "down"},
            "kid_lite": lite | {"title": "KID-lite", "direction": "down"},
            "clip_score": exact | {"title": "CLIP score"},
        },
        "rows": rows,
        "warnings": ["64 samples are few: see <b>docs</b>"],
        "timing": {
            "created": "2026-11-21T12:00:00+00:00", "parts_seconds": {"uncached: draw": 71.2},
            "rows": {name: {
                "seconds": {"median": s, "q1": s * 0.95, "q3": s * 1.1, "n": 7},
                "ratio": {"median": times["uncached"] / s, "q1": times["uncached"] / s * 0.93,
                          "q3": times["uncached"] / s * 1.05, "n": 7},
                "throughput": 8 / s, "peak_bytes": 1 << 28,
            } for name, s in times.items()},
        },
        "env": {"diffcache": "0.1.0", "python": "3.11", "torch": "2.13.0", "diffusers": "0.42.1",
                "device": "a processor", "threads": 1, "processes": 1, "commit": "abc"},
    }  # fmt: skip


def picture(number: int, damage: float) -> np.ndarray:
    """A disc on a gradient, with noise where it is damaged."""
    y, x = np.mgrid[:32, :32]
    disc = (x - 8 - 4 * number) ** 2 + (y - 16) ** 2 < 60
    pixels = np.stack([x * 6, y * 5, 160 - x * 3], -1).astype(float)
    pixels[disc] = (220, 60 + 30 * number, 40)
    noise = np.random.default_rng(number).normal(0, damage * 2, pixels.shape)
    return np.clip(pixels + noise, 0, 255).astype(np.uint8)


def make_run(folder: Path, record: dict[str, Any], prompt: str = EVIL) -> Path:
    """Write a run's folder as `diffcache eval` leaves it."""
    for this in record["rows"]:
        case = folder / this["folder"]
        (case / "samples").mkdir(parents=True)
        damage = this["quality"].get("fid_lite_to_uncached", {"value": 0})["value"] * 3
        for number in range(4):
            Image.fromarray(picture(number, damage)).save(case / "samples" / f"{number:05d}.png")
        line = {"batch": 0, "ids": [0, 1, 2, 3], "prompts": [f"{prompt}, {n}" for n in range(4)]}
        (case / "manifest.0.jsonl").write_text(json.dumps(line) + '\n{"batch": 1, "ids')
    (folder / "record.json").write_text(json.dumps(record))
    return folder


def brief_record() -> dict[str, Any]:
    """A record with one plot of every kind, so that reports of it are quickly made."""
    record = make_record()
    for this in record["rows"]:
        this["fidelity"] = {k: v for k, v in this["fidelity"].items() if k == "ssim"}
        this["quality"] = {k: v for k, v in this["quality"].items() if k.startswith("fid")}
    return record


def cells(record: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the cells of a column by the names of the rows."""
    table = table_of(record)
    place = [column.key for column in table.columns].index(key)
    return {row.name: row.cells[place] for row in table.rows}


def pixels_of(sheet: Picture) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sheet.png)))


class Reader(HTMLParser):
    """Collects what a page would fetch, its text, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "poster")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def read_page(file: Path) -> Reader:
    reader = Reader()
    reader.feed(file.read_text())
    assert reader.open == []
    return reader
