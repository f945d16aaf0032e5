"""Choose settings by what a model is, and say in one line what was chosen and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from diffcache.errors import AttachError
from diffcache.presets.published import Published, families, fitting, models

LEVELS = ("quality", "balanced", "fast")
FALLBACK = "taylorseer"  # of models that nobody published settings for


@dataclass(frozen=True)
class Preset:
    """Settings that were published for a model.

    Attributes:
        model: Name of the model, as in `diffcache.presets.published.models`.
        level: `quality`, `balanced` or `fast`.
        method: Name of a method.
        settings: Its settings, as `diffcache.wrap` takes them.
        source: Repository, commit and file that they are from.
        license: License of the source.
        measured: What its source measured, on what; empty where nobody published a measurement. None of it was
            measured by this project: the weights are too large for its tests.
        steps: Steps of the runs that they hold for.
        size: Pixels, and frames of a video, of the runs that they hold for.
        experts: Settings of single denoisers of a pipeline that has several, by their names, over `settings`.
        compared: Whether tests hold the computed steps against those of the source's code.
    """

    model: str
    level: str
    method: str
    settings: Mapping[str, Any]
    source: str
    license: str
    measured: str
    steps: int
    size: str
    experts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    compared: bool = True

    @property
    def name(self) -> str:
        """Name of the model and the level, as `wrap(pipe, preset=...)` takes it."""
        return f"{self.model}/{self.level}"

    @property
    def origin(self) -> str:
        """Where it is from, under which license, and whether its schedule is compared."""
        compared = "" if self.compared else "; its schedule is not compared with that of the source"
        return f"{self.source}, {self.license}{compared}"

    @property
    def word(self) -> str:
        """Method and settings as on a command line, without the name of its own model."""
        own = {key: value for key, value in self.settings.items() if value != self.model}
        parts = [word_of(self.method, own)]
        parts += [word_of(f"its {name}", settings) for name, settings in self.experts.items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class ChosenMethod:
    """The method of a pipeline that was asked for none, why it was chosen in one line, and its preset, if any."""

    method: str
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    preset: Preset | None = None

    def given(self, denoisers: Iterable[str], settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return method and settings as `wrap` takes them: one, or one for each denoiser that is wrapped.

        Settings that are given replace some of the preset.
        """
        experts = {} if self.preset is None else self.preset.experts
        if not experts:
            return self.method, {**self.settings, **settings}
        over = {key: value for key, value in settings.items() if key != "hold"}
        each = {name: word_of(self.method, {**self.settings, **experts.get(name, {}), **over}) for name in denoisers}
        return each, {key: value for key, value in settings.items() if key == "hold"}


def word_of(name: str, settings: Mapping[str, Any]) -> str:
    """Return a name and settings as one word of a command line."""
    shown = ",".join(f"{key}={value!r}" for key, value in settings.items())
    return f"{name}:{shown}" if shown else name


@cache
def presets() -> Mapping[str, Mapping[str, Preset]]:
    """Return the presets of all models: name of a model -> level -> preset.

    The table of a model says once what is the same for all of its levels.
    """
    found: dict[str, dict[str, Preset]] = {}
    for family in families().values():
        for model, table in family.get("presets", {}).items():
            shared = {key: value for key, value in table.items() if key not in LEVELS}
            own = {level: table[level] for level in LEVELS if level in table}
            found[model] = {level: Preset(model=model, level=level, **{**shared, **one}) for level, one in own.items()}
    return found


def known_models() -> list[str]:
    """Return the names of the models that there are presets for, or a reason why there are none."""
    return [name for name, model in models().items() if name in presets() or model.without]


def fitting_models(facts: Mapping[str, Any]) -> list[str]:
    """Return the models that a model may be, by its configuration, pipeline and folder."""
    return [
        name
        for name in fitting(known_models(), facts)
        if name in presets() or models()[name].word in str(facts["folder"]).lower()
    ]


TITLES = ("preset", "method and settings", "for runs of", "measured")


def rows_of_model(name: str) -> list[Sequence[str]]:
    """Return a row for each preset of a model of `known_models`, as `TITLES` has it."""
    rows: list[Sequence[str]] = [
        (one.name, one.word, f"{one.steps} steps, {one.size}", one.measured or "by nobody")
        for one in presets().get(name, {}).values()
    ]
    return rows or [(name, f"none: it {models()[name].without}", "", "")]


def choose(facts: Mapping[str, Any], wanted: str | None = None) -> ChosenMethod:
    """Choose the settings of a model.

    Args:
        facts: Facts about the model, as in `Method.check_model`.
        wanted: Level, `fast`, or name of a model and level, `flux.1-dev/fast`; None takes the balanced preset, or the
            one nearest to it, of the model that it is, and the fallback where it is none.

    Returns:
        What was chosen. Of a model that may be one of several, that is the fallback.

    Raises:
        AttachError: If there is no such preset, it is of another model, or nothing tells which of several models it
            is.
        ValueError: If `wanted` is no level.
    """
    if wanted is not None:
        return _took(_wanted(facts, wanted), facts)
    found = fitting_models(facts)
    if len(found) > 1:
        return _fall_back(f"it may be {' or '.join(found)}; say which: preset='{found[0]}/LEVEL'")
    if not found:
        return _fall_back(f"this {_described(facts)} is none of the models that have one")
    own = presets().get(found[0], {})
    if not own:
        return _fall_back(f"{found[0]} {models()[found[0]].without}")
    level = next(each for each in ("balanced", "quality", "fast") if each in own)
    return _took(own[level], facts)


def _wanted(facts: Mapping[str, Any], wanted: str) -> Preset:
    """Return the preset that was asked for."""
    name, _, level = str(wanted).rpartition("/")
    if level not in LEVELS:
        raise ValueError(f"preset={wanted!r}: must be {', '.join(LEVELS)}, or such as 'flux.1-dev/fast'")
    if name and name not in presets():
        raise AttachError(f"preset={wanted!r}: there are presets of {', '.join(presets())}")
    found = [name] if name else fitting_models(facts)
    if not found:
        raise AttachError(
            f"preset={wanted!r}: this {_described(facts)} is none of the models that have presets; "
            f"leave it out to take {FALLBACK}, or name a method"
        )
    if len(found) > 1:
        names = " or ".join(f"preset='{each}/{level}'" for each in found)
        raise AttachError(f"preset={wanted!r}: nothing tells which model this is; say {names}")
    other = "; ".join(models()[name].differs(facts)) if name else ""
    if other:
        raise AttachError(f"preset={wanted!r}: this {facts['model']} is another model: {other}")
    own = presets().get(found[0], {})
    if level not in own:
        there = f"there is {', '.join(own)}" if own else f"it {models()[found[0]].without}"
        raise AttachError(f"preset={wanted!r}: nobody published one for {found[0]}; {there}")
    return own[level]


def _took(preset: Preset, facts: Mapping[str, Any]) -> ChosenMethod:
    known = models()[preset.model]
    why = (
        f"{preset.name} is {preset.word}, published for {preset.steps} steps at {preset.size} "
        f"({preset.source}); taken for {_described(facts, known)}"
    )
    return ChosenMethod(preset.method, why, preset.settings, preset)


def _fall_back(why: str) -> ChosenMethod:
    return ChosenMethod(FALLBACK, f"none; fell back to {FALLBACK} with its defaults: {why}")


def _described(facts: Mapping[str, Any], known: Published | None = None) -> str:
    """Return the class of a model in words, with what a known one is recognized by."""
    sizes = {} if known is None else known.sizes
    shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
    words = f"{facts['model']} ({shown})" if shown else f"{facts['model']}"
    return f"{words} of a {facts['pipeline']}" if facts["pipeline"] else words
