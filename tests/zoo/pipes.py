"""Every tiny pipeline of the zoo, read from `pipes.toml`."""

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tests.zoo import pipe
from tests.zoo.pipe import PipeCase, assemble, prompt

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("pipes.toml")
# Functions that expressions of the table may call.
WORDS = ("component", "denoiser", "image", "image_encoder", "image_processor", "noise", "picture",
         "scaled", "settings", "tiny_vae", "Words")  # fmt: skip


def pipes() -> dict[str, PipeCase]:
    """Return the pipelines whose class the installed diffusers has, by name."""
    import diffusers

    exported = set(dir(diffusers))
    return {n: case for n, case in _all_pipes().items() if n.partition("-")[0] in exported}


@cache
def _all_pipes() -> dict[str, PipeCase]:
    said = tomllib.loads(FILE.read_text(encoding="utf-8"))
    components = said.pop("components")
    tables: dict[str, dict[str, Any]] = {}
    for name, table in said.items():
        before = tables.get(table.get("like", ""), {})
        inner = {key: before.get(key, {}) | table.get(key, {}) for key in ("parts", "call")}
        tables[name] = before | table | inner
    words = {word: getattr(pipe, word) for word in WORDS} | {"torch": torch}
    for name, expression in components.items():
        words[name] = partial(_component, expression, words)
    return {name: _case(name, table, words) for name, table in tables.items()}


def _component(expression: str, words: dict[str, Any], seed: int) -> Any:
    return _value(expression, {**words, "seed": seed})


def _case(name: str, table: dict[str, Any], words: dict[str, Any]) -> PipeCase:
    build, call = partial(_build, name, table, words), partial(_call, table, words)
    denoisers = tuple(table.get("denoisers", ("transformer",)))
    return PipeCase(name, build, call, denoisers, table.get("branches", 1))


def _build(name: str, table: dict[str, Any], words: dict[str, Any], seed: int) -> Any:
    """Build a pipeline from a seed of the weights; parts may name those before them."""
    parts: dict[str, Any] = {}
    for part, said in table["parts"].items():
        parts[part] = _value(said, {**words, **parts, "seed": seed})
    made = assemble(name.partition("-")[0], _component(table["scheduler"], words, seed), **parts)
    if "default_sample_size" in table:
        made.default_sample_size = table["default_sample_size"]
    return made


def _call(table: dict[str, Any], words: dict[str, Any], pipeline: Any, seed: int, steps: int) -> dict[str, Any]:
    """Make the arguments of a call, with latents as output where the table names none."""
    if table.get("global_seed"):
        torch.manual_seed(seed)
    made: dict[str, Any] = dict(
        num_inference_steps=steps, generator=torch.Generator().manual_seed(seed), output_type="latent"
    )
    said = dict(table["call"])
    if "size" in said:
        made["height"] = made["width"] = said.pop("size")
    if "text" in said:
        asked = set(said.pop("text").split())
        kinds = {kind: kind in asked for kind in ("negative", "pooled")}
        mask = "".join(asked - set(kinds))
        made |= prompt(seed, mask=mask, **kinds)
    return made | {name: _value(value, {**words, "seed": seed}) for name, value in said.items()}


def _value(said: Any, names: dict[str, Any]) -> Any:
    """Return the value of an expression, which may name classes of diffusers; else what is said."""
    if not isinstance(said, str):
        return said
    import diffusers

    code = compile(said, str(FILE), "eval")
    classes = {name: getattr(diffusers, name) for name in code.co_names if hasattr(diffusers, name)}
    return eval(code, {**classes, **names})
