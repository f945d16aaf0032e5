"""Find the denoisers that a command line names, and describe their anatomy in tables."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import diffcache
from diffcache.attach.anatomy import Anatomy
from diffcache.attach.fingerprint import facts_of
from diffcache.files import read_json
from diffcache.pipelines.demo.saved import locate, pipeline_of
from diffcache.pipelines.shipped_models import places
from diffcache.targets import denoisers_of

if TYPE_CHECKING:
    from rich.console import RenderableType


EXCLUDED: dict[str, str] = {
    "HunyuanDiT2DControlNetModel": "control network: makes residuals for a denoiser",
    "HunyuanDiT2DMultiControlNetModel": "control networks: make residuals for a denoiser",
    "LongCatAudioDiTVae": "autoencoder, has no denoising forward",
    "MiniMaxMusic3RVQDepthDecoder": "autoregressive decoder of codebook tokens, no timestep",
    "UniDiffuserTextDecoder": "language model that decodes text, has no denoising forward",
}
# class -> list -> how its blocks are chained; written by diffcache.eval.workshop.denoiser_coverage
STREAMS_FILE = Path(__file__).with_name("streams.json")
_DENOISER = re.compile(r"Transformer|DiT|UNet|UVit|UniDiffuser|T5Film|RVQDepth")
_DEFAULT = (
    "Of the default configuration of {}, which may be none of a real model. Name a directory or a "
    "Hugging Face model ID to see that of one."
)


def exported_denoisers() -> list[str]:
    """List the model classes of the installed diffusers that are named like denoisers, sorted.

    A few of them denoise nothing, see `EXCLUDED`.
    """
    import diffusers

    named = (name for name in dir(diffusers) if _DENOISER.search(name))
    return sorted(name for name in named if _is_model(name))


def _is_model(name: str) -> bool:
    """Return whether a name of diffusers is a class of models, as pipelines are not."""
    import diffusers

    try:
        found = getattr(diffusers, name)
    except (ImportError, RuntimeError):  # a pipeline that needs another release of transformers
        return False
    return isinstance(found, type) and issubclass(found, diffusers.ModelMixin)


def find(target: str) -> dict[str, tuple[Anatomy, dict[str, str]]]:
    """Return the anatomy of every denoiser that a name stands for, and its streams.

    Streams come from a table by class; they are empty for a class that it does not have.

    Args:
        target: Directory of a saved pipeline or model, also of transformers (its configuration is enough, weights are
            not read); or a shipped name, a pipeline's Hugging Face model ID, or a class name of diffusers.

    Raises:
        ValueError: If it is none of these, or a model that comes with its own code.
        AttachError: If there is no denoiser with lists of blocks.
    """
    path = directory_of(target)
    if (path / "model_index.json").exists():
        parts = SimpleNamespace(components=dict(_components(path)))
        anatomies = diffcache.inspect(parts)
        if isinstance(anatomies, Anatomy):
            raise TypeError("a pipeline has denoisers by name")
        return {name: (found, _streams(found.model)) for name, found in anatomies.items()}
    if (path / "config.json").exists():
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in config:
            raise ValueError(
                f"{target}: comes with code of its own, which is not run here; load it with "
                "DiffusionLM.from_pretrained(..., trust_remote_code=True) and look at "
                "diffcache.inspect(lm.model)"
            )
        names = config.get("architectures") or [config.get("_class_name")]
        anatomy = _anatomy(_skeleton(path, str(names[0])))
        return {target: (anatomy, _streams(anatomy.model))}
    if target in EXCLUDED or target not in exported_denoisers():
        raise ValueError(_unknown(target))
    return {target: (_anatomy(_of_class(target)), _streams(target))}


def saved_facts(target: str) -> dict[str, Any]:
    """Return facts about the first denoiser of a saved pipeline, as `Method.check_model` takes them.

    `target` is a directory, a shipped name, or a Hugging Face model ID.

    Raises:
        FileNotFoundError: If there is no saved pipeline.
        AttachError: If it has no denoiser.
    """
    path = locate(target, configs_only=True)
    components = dict(_components(path))
    cls, _ = pipeline_of(path)
    pipeline = type(cls, (), {"components": components, **components})()
    model = next(iter(denoisers_of(pipeline).values()))
    return facts_of(model, None, pipeline)


def directory_of(target: str) -> Path:
    """Return the directory that a name stands for; for a class name, a path that does not exist."""
    if target.isidentifier() and target in exported_denoisers():
        return Path(target)
    for path in places(target):
        if (path / "config.json").exists():
            return path
    try:
        return locate(target, configs_only=True)
    except FileNotFoundError:
        if "/" in target:
            raise
        return Path(target)


def describe(name: str, anatomy: Anatomy, streams: Mapping[str, str]) -> Iterator[RenderableType]:
    """Yield the description of one denoiser, for `rich`.

    `streams` maps a list to the way in which its blocks are chained; it may be empty.
    """
    from rich import box
    from rich.table import Table

    title = anatomy.model if name == anatomy.model else f"{name}: {anatomy.model}"
    yield f"[bold]{title}[/bold]"
    if name == anatomy.model:
        yield _DEFAULT.format(name)
    yield f"timestep argument: {anatomy.timestep or 'none; the scheduler tells the steps'}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("blocks", "depth", "share"):
        table.add_column(column, no_wrap=True)
    table.add_column("classes", overflow="fold")
    for entry in anatomy.lists:
        table.add_row(entry.key, str(entry.depth), f"{entry.share:.0%}", ", ".join(entry.classes))
    for key in anatomy.singles:
        table.add_row(key, "1", "", "a block of its own")
    for entry in anatomy.excluded:
        classes = ", ".join(entry.classes)
        always = f"{classes} (small: always runs)"
        table.add_row(entry.key, str(entry.depth), f"{entry.share:.0%}", always)
    yield table
    yield "streams, output -> argument of the next block:"
    for entry in anatomy.lists:
        yield f"  {entry.key}: {streams.get(entry.key, 'not traced')}"
    counts = Counter((m.list_key, m.child, m.kind) for m in anatomy.modules)
    if not counts:
        yield "no attention or feed-forward modules inside the blocks"
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("modules in", "child", "kind", "count"):
        table.add_column(column, overflow="fold")
    for (key, child, kind), count in counts.items():
        table.add_row(key, child, kind, str(count))
    yield table


def _components(path: Path) -> Iterator[tuple[str, nn.Module]]:
    """Yield diffusers' models of a saved pipeline, or its language model, without their weights."""
    index = json.loads((path / "model_index.json").read_text(encoding="utf-8"))
    for name, entry in index.items():
        if not (path / name / "config.json").exists():
            continue
        if not isinstance(entry, list):
            continue
        if entry[0] == "diffusers" or (entry[0] == "transformers" and name == "model"):
            yield name, _skeleton(path / name, entry[1])


def _skeleton(path: Path, cls: str) -> nn.Module:
    """Build a model from its configuration, without memory for weights where that works."""
    import diffusers
    import transformers

    found: Any = getattr(diffusers, cls, None) or getattr(transformers, cls, None)
    if found is None:
        raise ValueError(f"{path} holds a {cls}, which neither the installed diffusers nor transformers has")
    if issubclass(found, transformers.PreTrainedModel):
        make, config = found, found.config_class.from_pretrained(str(path))
    else:
        make, config = found.from_config, found.load_config(str(path))
    try:
        with torch.device("meta"):
            model: nn.Module = make(config)
    except (RuntimeError, NotImplementedError, TypeError):  # constructors that look at values
        model = make(config)
    return model


def _anatomy(model: nn.Module) -> Anatomy:
    found = diffcache.inspect(model)
    if not isinstance(found, Anatomy):
        raise TypeError(f"{type(model).__name__} is not a model")
    return found


def _streams(cls: str) -> dict[str, str]:
    """Return how the blocks of the lists of a class are chained; empty where nobody traced it."""
    found: dict[str, str] = read_json(STREAMS_FILE).get(cls, {})
    return found


def _of_class(cls: str) -> nn.Module:
    """Build a model of a class in its default configuration, without memory for weights.

    Raises ValueError if the class needs arguments that have no default.
    """
    import diffusers

    try:
        with torch.device("meta"):
            model: nn.Module = getattr(diffusers, cls)()
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{cls}: has no default configuration that is complete; name a directory that holds "
            "one, or a Hugging Face model ID"
        ) from error
    return model


def _unknown(target: str) -> str:
    """Return the error text for an unknown name."""
    if target in EXCLUDED:
        return f"{target} is not cached: {EXCLUDED[target]}"
    known = [name for name in exported_denoisers() if name not in EXCLUDED]
    close = [name for name in known if len(target) > 2 and target.lower() in name.lower()]
    close = close or difflib.get_close_matches(target, known, n=1)
    hint = f"; did you mean {' or '.join(close[:3])}?" if close else ""
    return (
        f"{target!r} is neither a directory of a pipeline or model, nor a shipped model, a Hugging "
        f"Face model ID or a known class{hint}"
    )
