"""kvpress as a peer: it chooses the slots that stay, and our store holds exactly those.

So both are asked in the same way, about the same contexts: `kvpress/snapkv:budget=0.25`.

kvpress (NVIDIA, Apache-2.0) pins an older transformers, and its hooks do not run on ours; its `compress` methods do,
called one layer and one row at a time, which is how its own pipeline calls them (batch size 1). Only single press
files are imported: kvpress' own `__init__` would patch every attention function of transformers and import `datasets`,
`fire` and `cachetools`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from diffcache.errors import UnknownMethodError
from diffcache.eval.metrics.inception import MissingPackageError
from diffcache.foreign import with_cache
from diffcache.kv.budget import Budget
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.base import Score
from diffcache.kv.settings import check_size

PREFIX = "kvpress/"
INSTALL = "pip install --no-deps kvpress==0.5.5"
SKETCH_SEED = 7


@dataclass(frozen=True)
class Spec:
    """A press: its file and class, its settings, the press that it wraps, and the inputs that it reads."""

    file: str
    cls: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    attentions: bool = False


WINDOW = {"window_size": 8, "kernel_size": 5}
FUTURE = {"n_future_positions": 512, "n_sink": 4}
_SAFE = {"alpha_safeguard": 0.2}
_TWO_STAGES = {"epsilon": 1e-4, "first_stage_ratio": 0.5}
# Settings are kvpress' defaults except where a default is too long for a few hundred tokens:
# windows (64), lags (128), chunks (256, 1024), blocks (128), chunks of ChunkKV (20), the sketch
# (48), and `epsilon` of expected attention (0), which is 0.02 in the press that LU-KV wraps by
# default. Presses that need tables of other models are left out.
PRESSES: Mapping[str, Spec] = {
    "knorm": Spec("knorm_press", "KnormPress"),
    "keydiff": Spec("keydiff_press", "KeyDiffPress"),
    "streaming_llm": Spec("streaming_llm_press", "StreamingLLMPress", {"n_sink": 4}),
    "snapkv": Spec("snapkv_press", "SnapKVPress", WINDOW),
    "tova": Spec("tova_press", "TOVAPress"),
    "observed_attention": Spec("observed_attention_press", "ObservedAttentionPress", attentions=True),
    "criticalkv": Spec("criticalkv_press", "CriticalKVPress", _TWO_STAGES, "snapkv"),
    "expected_attention": Spec(
        "expected_attention_press",
        "ExpectedAttentionPress",
        {**FUTURE, "use_covariance": True, "use_vnorm": True, "epsilon": 0.02},
    ),
    "lagkv": Spec("lagkv_press", "LagKVPress", {"n_sink": 4, "lag_size": 12}),
    "leverage": Spec("leverage_press", "LeverageScorePress", {"sketch_dimension": 12}),
    "non_causal": Spec("non_causal_attention_press", "NonCausalAttnPress", {"chunk_size": 32}),
    "compactor": Spec(
        "compactor_press",
        "CompactorPress",
        {"sink_size_start": 8, "sink_size_end": 4, "chunk_size": 32, "sketch_dimension": 12},
    ),
    "cur": Spec("cur_press", "CURPress", {"num_sinks": 4, "leverage_type": "kv_product", "local_window_size": 16}),
    "cap": Spec("cap_press", "CapPress", {"tau": 5.0, **FUTURE}),
    "pyramidkv": Spec("pyramidkv_press", "PyramidKVPress", {**WINDOW, "beta": 20}),
    "adakv": Spec("adakv_press", "AdaKVPress", _SAFE, "snapkv"),
    "critical_adakv": Spec("criticalkv_press", "CriticalAdaKVPress", {**_SAFE, **_TWO_STAGES}, "snapkv"),
    "chunkkv": Spec("chunkkv_press", "ChunkKVPress", {"chunk_length": 8}, "snapkv"),
    "chunk_keydiff": Spec("chunk_press", "ChunkPress", {"chunk_length": 18}, "keydiff"),
    "block_keydiff": Spec("block_press", "BlockPress", {"block_size": 16}, "keydiff"),
}


@dataclass(frozen=True)
class PressPeer:
    """A press of kvpress with its settings."""

    press: str  # a key of `PRESSES`
    budget: float = 0.5  # share of the tokens that stays, above 0 and at most 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the press, instead of those in `PRESSES`

    @property
    def name(self) -> str:
        """Name of the row."""
        return PREFIX + self.press

    @torch.no_grad()
    def recipe(self, model: nn.Module, ids: Tensor) -> Recipe:
        """Return a recipe that keeps the slots that kvpress keeps of a context.

        The model must have the Llama architecture; `ids` are int64 [B, T], without padding.
        """
        spec = PRESSES[self.press]
        with showing(model):
            masks = [
                kept(seen, lambda: build(spec, 1 - self.budget, self.settings), spec.attentions)
                for seen in capture(model, ids)
            ]
        return Recipe(self.name, score=MasksOfAPress(tuple(masks)), budget=AllGiven(), plan=TopK())


def peer(name: str, budget: float = 0.5, **settings: Any) -> PressPeer:
    """Return a row of kvpress.

    Args:
        name: `kvpress/` and a key of `PRESSES`.
        budget: Share of the tokens that stays.
        settings: Settings of the press.

    Raises:
        UnknownMethodError: If there is no such press.
        MissingPackageError: If kvpress is not installed; the message says how.
        ValueError: If the budget is no share, or the press has no such setting.
    """
    short = name.removeprefix(PREFIX)
    if short not in PRESSES:
        raise UnknownMethodError(f"unknown press {short!r}; known: {', '.join(PRESSES)}")
    check_size("budget", budget)
    if not isinstance(budget, float):
        raise ValueError(f"budget={budget!r}: kvpress takes a share of the tokens, such as 0.25")
    if installed() is None:
        raise MissingPackageError(f"{name}: kvpress is not installed: {INSTALL}")
    build(PRESSES[short], 1 - budget, settings)  # raises an error that names a wrong setting
    return PressPeer(short, budget, settings)


@dataclass(frozen=True, eq=False)
class MasksOfAPress(Score):
    """Give a score of one to slots that a press keeps, and zero to the others."""

    masks: Sequence[Tensor]  # mask of the slots that stay for each layer, bool [B, H, S], in order of position

    def __call__(self, seen: Observation) -> Tensor:
        """Return the mask."""
        mask, shape = self.masks[seen.layer], seen.slots.k.shape[:3]
        if mask.shape != shape:
            raise ValueError(f"{list(mask.shape)} slots were said to stay or go, not {list(shape)}")
        return mask.float()

    def __repr__(self) -> str:
        """Return shapes instead of numbers, to be short."""
        return f"MasksOfAPress({[list(mask.shape) for mask in self.masks]})"


@dataclass(frozen=True)
class AllGiven(Budget):
    """Keep all slots with a score above zero."""

    size = 1.0

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the number of scores of each row that are above zero."""
        return [(score > 0).sum(-1) for score in scores]


# What a model shows to presses --------------------------------------------------------------------


@dataclass
class Seen:
    """Inputs and outputs of one attention layer: tensors with B rows.

    `hidden` is the input of the layer; `q` [B, Hq, S, D] and `k` are rotated; `attentions` are the
    eager weights [B, Hq, S, S]; `cos` and `sin` are [B, S, D].
    """

    module: Any
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attentions: Tensor
    cos: Tensor
    sin: Tensor

    def row(self, b: int) -> Seen:
        """Return row `b` alone, copied: presses write into their inputs."""
        parts = (self.hidden, self.q, self.k, self.v, self.attentions, self.cos, self.sin)
        return Seen(self.module, *(part[b : b + 1].clone() for part in parts))

    @property
    def rotation(self) -> dict[str, Any]:
        """Return the keyword arguments that presses read."""
        return {"position_embeddings": (self.cos, self.sin), "hidden_states": self.hidden}


@contextlib.contextmanager
def showing(model: Any) -> Iterator[None]:
    """Have a model show its attention, and its rotary embedding where kvpress looks for it."""
    attentions = [layer.self_attn for layer in model.model.layers]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    for attention in attentions:
        attention.rotary_emb = model.model.rotary_emb
    try:
        yield
    finally:
        for attention in attentions:
            del attention.rotary_emb
            vars(attention).pop("masked_key_indices", None)  # which presses set
        model.set_attn_implementation(before)


@torch.no_grad()
def capture(model: Any, ids: Tensor) -> list[Seen]:
    """Run a model that shows its attention once, and return what every layer saw.

    The model must have the Llama architecture; `ids` are int64 [B, S], without padding.
    """
    layers: list[Seen] = []
    cache = DynamicCache(config=model.config)

    def look(module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        q = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        q, _ = apply_rotary_pos_emb(q, q, cos, sin)
        layer = cache.layers[module.layer_idx]
        rows = ids.shape[0]
        cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
        layers.append(Seen(module, hidden, q, layer.keys, layer.values, output[1], cos, sin))

    handles = [layer.self_attn.register_forward_hook(look, with_kwargs=True) for layer in model.model.layers]
    try:
        model(ids, **with_cache(model, cache))
    finally:
        for handle in handles:
            handle.remove()
    return layers


# kvpress itself ----------------------------------------------------------------------------------


def installed() -> str | None:
    """Return the version of kvpress, or None where it is not installed."""
    try:
        return importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def press_class(file: str, cls: str) -> Any:
    """Import one press file without the package's `__init__` and without its heavy imports."""
    spec = importlib.util.find_spec("kvpress")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"kvpress is missing: {INSTALL}")
    stubs = {
        "kvpress": _stub("kvpress", __path__=[str(Path(spec.origin).parent)]),
        "cachetools": _stub("cachetools", LRUCache=dict, cached=lambda *_, **__: lambda function: function),
        "datasets": _stub("datasets", load_dataset=None),
    }
    absent = {name: stub for name, stub in stubs.items() if name not in sys.modules}
    sys.modules.update(absent)
    try:
        return getattr(importlib.import_module(f"kvpress.presses.{file}"), cls)
    finally:
        for name in absent:
            del sys.modules[name]


def _stub(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    return module


def build(spec: Spec, ratio: float, settings: Mapping[str, Any] | None = None) -> Any:
    """Build a press.

    Args:
        spec: Specification of the press.
        ratio: Share of the tokens that is removed.
        settings: Settings instead of those of `spec`; a wrapper passes those that it lacks to the press inside it.

    Raises:
        ValueError: If there is no such setting.
    """
    cls = press_class(spec.file, spec.cls)
    # The budget is a press' ratio, and wrappers are given the press inside them.
    known = {each.name for each in dataclasses.fields(cls)} - {"compression_ratio", "press"}
    left = dict(settings or {})
    own = {**spec.settings, **{key: left.pop(key) for key in sorted(known & left.keys())}}
    if spec.base is not None:
        return cls(press=build(PRESSES[spec.base], ratio, left), **own)
    if left:
        taken = ", ".join(sorted(known)) or "none"
        raise ValueError(f"kvpress' {spec.cls} has no setting {min(left)!r}; it has: {taken}")
    return cls(**{"compression_ratio": ratio, **own})


@contextlib.contextmanager
def calling(seen: Seen) -> Iterator[None]:
    """Fix the seed of sketches, and name an attention that presses of ragged heads accept."""
    config = seen.module.config
    before = config._attn_implementation
    seen.module.masked_key_indices = None
    config._attn_implementation = "sdpa"
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(SKETCH_SEED)
            yield
    finally:
        config._attn_implementation = before


def compress(row: Seen, press: Any, attentions: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and the kept slots as a mask [1, H, S], after a press.

    Keys and values are put in order of position; a press of ragged heads returns them all. `attentions` says whether
    the press reads the attention weights.
    """
    whole = row.k.clone()
    with calling(row):
        weights = row.attentions if attentions else None
        k, v = press.compress(row.module, row.hidden, row.k, row.v, weights, row.rotation)
    masked = row.module.masked_key_indices
    if masked is not None:
        mask = torch.ones(whole.shape[:3], dtype=torch.bool, device=whole.device)
        mask[masked] = False
        return k, v, mask
    # These rows are copies, and no two slots are alike.
    same = (k[:, :, :, None] == whole[:, :, None]).all(-1)
    assert (same.sum(-1) == 1).all()
    order = same.int().argmax(-1).argsort(-1)[..., None].expand_as(k)
    return k.gather(2, order), v.gather(2, order), same.any(2)


def kept(seen: Seen, make: Callable[[], Any], attentions: bool = False) -> Tensor:
    """Return the kept slots of all rows as a mask [B, H, S]; `make` builds the press anew."""
    rows = map(seen.row, range(len(seen.k)))
    return torch.cat([compress(row, make(), attentions)[2] for row in rows])
