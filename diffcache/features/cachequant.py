"""Reuse corrected features on a dynamic schedule, with or without quantized layers (CacheQuant)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from diffcache.errors import TablesError
from diffcache.features.base import Ability, Instead, Spacing
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.correction import channel_axis
from diffcache.features.parts.quantize import Quantize
from diffcache.features.parts.when import Every, Listed
from diffcache.features.schema import Entry, Schema, shown
from diffcache.features.tables import Tables
from diffcache.quant.plan import Bits, QuantPlan
from diffcache.ranges import Whole
from diffcache.step import Site, Step


@dataclass
class Anchored:
    """A feature and the step it was computed at."""

    key: str  # name of its tables, `<site>/<index>`
    feature: Tensor | None = None  # the last computed feature
    anchor: int = -1  # index of its step


@dataclass(frozen=True)
class Corrected(Instead):
    """Use the last computed feature again, through an affine map per step and channel.

    At step `s` of the segment that starts at the computed step `r` the estimate is
    `a[s, c] * F_r + b[s, c]`, with `a = 1` and `b = 0` at `r` itself (CacheQuant, arXiv
    2503.01323, section 3.3). A feature that was computed at another step than the schedule's, for
    instance because the inputs changed, is reused as it is: the maps are not for it.

    Args:
        tables: Tables with `starts`, `[K]` int64, and for every feature `cache/<name>/a` and `/b`,
            `[T, C]`.
    """

    tables: Tables
    # maps by feature, dtype and device: moved once, never changed
    _maps: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def init(self) -> Anchored:
        """Return the state of the only feature; raise TablesError if the tables hold the maps of several."""
        keys = feature_names(self.tables)
        if len(keys) != 1:
            raise TablesError(
                f"tables={self.tables!r}: hold {len(keys)} features ({', '.join(keys)}), and it is "
                "not known which one is asked for"
            )
        return Anchored(keys[0])

    def init_at(self, site: str, index: int) -> Anchored:
        """Return the state of tensor `index` of a site; raise TablesError if the tables have no maps for it."""
        key, keys = f"{site}/{index}", feature_names(self.tables)
        if key not in keys:
            raise TablesError(
                f"tables={self.tables!r}: no maps for feature {key}; they have {', '.join(keys)}; "
                "calibrate on this model with these settings"
            )
        return Anchored(key)

    def record(self, state: Anchored, step: Step, feature: Tensor) -> None:
        """Keep the feature, forget the last."""
        state.feature, state.anchor = feature, step.index
        self._maps_of(state.key, feature)

    def _maps_of(self, key: str, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return `a` and `b` of a feature, each `[T, C]` for its channels, in its dtype and on its device."""
        place = key, feature.dtype, feature.device
        if place not in self._maps:
            a, b = (self.tables[f"cache/{key}/{name}"].to(feature) for name in "ab")
            self._maps[place] = a, b
        a, b = self._maps[place]
        channels = feature.shape[channel_axis(feature)]
        if a.shape[1] != channels:
            raise TablesError(
                f"tables={self.tables!r}: maps of {key} for {a.shape[1]} channels, the feature has "
                f"{channels}; calibrate on this model"
            )
        return a, b

    def estimate(self, state: Anchored, step: Step) -> Tensor:
        """Return the feature through the step's map."""
        assert state.feature is not None
        if not self._maps_hold(state, step):
            return state.feature
        shape = [1] * state.feature.dim()
        shape[channel_axis(state.feature)] = -1
        maps = self._maps_of(state.key, state.feature)
        a, b = (table[step.index].view(shape) for table in maps)
        return torch.addcmul(b, state.feature, a)

    def _maps_hold(self, state: Anchored, step: Step) -> bool:
        """Return whether the feature is the one the step's map was fitted for."""
        if step.index == state.anchor or step.index >= self.tables.steps:
            return False
        starts: list[int] = self.tables["starts"].tolist()
        # Maps are fitted from the start of a segment: after a step that was computed out of turn they are wrong.
        return state.anchor == max(start for start in starts if start <= step.index)

    def held(self, state: Anchored) -> list[Tensor]:
        """Return the kept feature."""
        return [] if state.feature is None else [state.feature]


@dataclass(frozen=True)
class CacheQuant(Calibrated):
    """Reuse corrected features on a dynamic schedule, with quantized layers if `bits` is given.

    Reference: CacheQuant, arXiv 2503.01323. A dynamic programme chooses the computed steps
    (section 3.2): `ceil(T / every)` segments of `ceil(every / 2)` to `2 * every` steps that
    together have the least L1 distance between each step's feature and the segment's first; where
    no split has these lengths, any may be taken. Two corrections follow (section 3.3): the reused
    feature goes through an affine map per step and channel, and the outputs of quantized layers
    through another. Quantized layers have weights per output channel and activations per tensor
    with a scale of their own at every step.

    Calibration runs every prompt once in float and, with `bits`, twice more: with quantized
    layers, to fit the layers' maps, and with those maps, where every call is made a second time
    with dense layers. The joint schedule then minimises the distances between the quantized
    feature that would be held and the dense feature that would be wanted, given the same inputs,
    and the maps of features are fitted from the one to the other.

    The cached feature is the paper's: on a UNet what enters its last layer, so that a skipped step
    runs `conv_in`, that layer and `conv_out`.

    Departures from the paper: on a DiT the cached feature is the residual over the blocks between
    `lead` and `tail` (the paper's DiT code is not published); the maps of a layer are fitted on its
    whole output instead of the half that reads the cached feature, for every layer that
    `corrected` names instead of two; ranges of activations are those seen, where the released code
    searches for those of the least error and averages them over batches; all layers outside the
    blocks stay in float instead of the first and the last. Left out are the quantization of what
    attention multiplies (queries, keys, values and the softmax), which stays in float here, and
    the reconstruction of weights (AdaRound), which are rounded to nearest.

    Args:
        every: Mean length of a segment in steps, N in the paper; 1 computes every step.
        bits: `w8a8`, `w4a8`, or None for the cache alone.
        site: Site of the features: `deep`, `stack`, `run` or `block`. `deep` splits a UNet
            between the layers of its blocks, as the paper does, and is `stack` elsewhere.
        lead: Blocks at the start that always run; at `deep` on a UNet, layers from `conv_in` on.
        tail: Blocks at the end that always run; at `deep` on a UNet, layers. The paper has 1 and 1
            for latent models, 4 and 4 on CIFAR-10.
        blocks: With `site="run"`, the blocks to cache.
        schedule: `dynamic`, or `uniform` for one step in `every` (the paper's LSUN settings).
        corrected: Layers whose output is mapped, as patterns of paths with `*` and `?`; the
            paper's two on Stable Diffusion's UNet are `up_blocks.3.resnets.2.conv1` and
            `up_blocks.3.resnets.2.conv_shortcut`.
        exempt: Layers that stay in float, as patterns, besides those outside the blocks.
        official: Fit as the released code does: the covariance over `n` and the variance over
            `n - 1`, and layers with their bias, which leaves `(1 - a) * bias` too much.
        tables: Tables of `diffcache.calibrate`, or their file; not needed with `every=1` and no
            `bits`.

    Raises:
        TablesError: If the tables were made for another method or other settings.
    """

    collected_by: ClassVar[str] = "diffcache.offline.cachequant_collect:CacheQuantCollector"
    schema: ClassVar[Schema] = Schema(
        {
            "starts": Entry(("computed",), whole=True, low=0, high="steps-1", ascending=True, first=0),
            "cache/*/a": Entry(("steps", "channels"), low=-1e4, high=1e4),
            "cache/*/b": Entry(("steps", "channels"), low=-1e6, high=1e6),
            "quant/*/weight_scale": Entry(("channels",), positive=True, high=1e4),
            "quant/*/weight_zero": Entry(("channels",), whole=True, low=0, high=255),
            "quant/*/input_scale": Entry(("steps",), positive=True, high=1e6),
            "quant/*/input_zero": Entry(("steps",), whole=True, low=0, high=255),
            "quant/*/gain": Entry(("steps", "channels"), low=-1e4, high=1e4, optional=True),
            "quant/*/shift": Entry(("steps", "channels"), low=-1e6, high=1e6, optional=True),
        },
        may_lack=("cache/", "quant/"),
    )

    every: Spacing = 5
    bits: Bits | None = None
    site: Site | str = Site.DEEP
    lead: Whole = 1
    tail: Whole = 1
    blocks: tuple[str, ...] | str = ()
    schedule: Literal["dynamic", "uniform"] = "dynamic"
    corrected: tuple[str, ...] | str = ("*",)
    exempt: tuple[str, ...] | str = ()
    official: bool = False
    tables: Tables | str | None = field(default=None)

    def check(self) -> None:
        """Raise unless site, names and tables are those of the settings."""
        for name in ("blocks", "corrected", "exempt"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        plain = self.plain()
        site = Site.of(plain.site)
        object.__setattr__(self, "site", site)
        if site not in (Site.DEEP, Site.STACK, Site.RUN, Site.BLOCK):
            raise ValueError(f"site={site.value!r}: must be 'deep', 'stack', 'run' or 'block'")
        super().check()
        if isinstance(self.tables, Tables):
            self._check_settings(self.tables)

    def plain(self) -> Combine:
        """Return every step computed, at the method's site."""
        return Combine(Every(1), site=self.site, lead=self.lead, tail=self.tail, blocks=self.blocks)

    def parts(self) -> Combine:
        """Return the measured schedule and the corrected reuse; raise UncalibratedError if there are no tables."""
        if self.every == 1 and self.bits is None:
            return self.plain()
        tables = self.measured()
        when = Listed(tables["starts"].tolist(), total=tables.steps)
        if self.every == 1:
            return Combine(when, site=self.site, lead=self.lead, tail=self.tail, blocks=self.blocks)
        return Combine(when, Corrected(tables), self.site, self.lead, self.tail, blocks=self.blocks)

    def abilities(self) -> tuple[Ability, ...]:
        """Return feature reuse and the quantized layers, if there are any."""
        if self.bits is None:
            return super().abilities()
        tables = self.measured()
        names = [name for name in tables.names() if name.startswith("quant/")]
        found = {name.removeprefix("quant/"): tables[name] for name in names}
        return (*super().abilities(), Quantize(QuantPlan.of(self.bits, found)))

    def settings(self) -> dict[str, Any]:
        """Return the settings that the tables depend on, as plain data."""
        return {
            "every": self.every,
            "bits": self.bits,
            "site": Site.of(self.site).value,
            "lead": self.lead,
            "tail": self.tail,
            "blocks": list(self.blocks),
            "schedule": self.schedule,
            "corrected": list(self.corrected),
            "exempt": list(self.exempt),
            "official": self.official,
        }

    def _check_settings(self, tables: Tables) -> None:
        """Raise TablesError unless the tables were made for these settings."""
        for name, mine in self.settings().items():
            theirs = tables.header.get(name)
            if theirs != mine:
                raise TablesError(
                    f"tables={tables!r}: made for {name}={shown(theirs)}, not {name}={mine!r}; "
                    "give the method the same settings or calibrate it"
                )
        for table in (["cache/"] if self.every > 1 else []) + (["quant/"] if self.bits else []):
            if not any(name.startswith(table) for name in tables.names()):
                raise TablesError(f"tables={tables!r}: hold no {table}; calibrate again")
        # A step without a map, at which a = 1 in every channel, was computed when the maps were fitted. If
        # `starts` were edited since, such a step would be reused uncorrected: that is refused.
        fitted = {
            step
            for name in tables.names()
            if name.startswith("cache/") and name.endswith("/a")
            for step in (tables[name] != 1).any(1).nonzero().flatten().tolist()
        }
        lost = set(range(tables.steps)) - fitted - set(tables["starts"].tolist())
        if self.every > 1 and fitted and lost:
            raise TablesError(
                f"tables={tables!r}: starts={tables['starts'].tolist()} leaves out step "
                f"{min(lost)}, which no correction was fitted for; calibrate again"
            )


def _names(argument: str, value: Any) -> tuple[str, ...]:
    """Return one name or several as a tuple; raise ValueError if they are none."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (tuple, list)) or not all(isinstance(name, str) for name in value):
        example = "'blocks.2-9'" if argument == "blocks" else "'*.ff.net.2'"
        raise ValueError(f"{argument}={value!r}: must be a name such as {example} or a tuple of names, () for none")
    return tuple(value)


def feature_names(tables: Tables) -> list[str]:
    """Return the features, `<site>/<index>`, that tables have maps for."""
    names = (name for name in tables.names() if name.startswith("cache/") and name.endswith("/a"))
    return [name.removeprefix("cache/").removesuffix("/a") for name in names]
