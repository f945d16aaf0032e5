"""Every method with a threshold, asked together whether a step is computed at nearly zero."""

from dataclasses import dataclass, field
from typing import Any

from diffcache.catalog import make_method
from diffcache.features.base import Ability, Probe, When
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.registry import rows_of
from tests.methods import TABLES, fields

TINY = 1e-9
# Thresholds of tables, which tests/test_families.py calibrates, of which tokens are edited, and of
# what a model returned, which nobody tells those that are asked together; the gate inside of a
# mask is DBCache's, and there is no mask for three steps.
NO_GATE = {
    "ertacache",
    "harmonica",
    "regione",
    "easycache",
    "lazycache",
    "step-reuse",
    "dbprune",
    "step-mask",
    "speca",
}
# What lets a method decide by what it sees from the second step on, where it has such a setting.
AT_ONCE: dict[str, Any] = {"warmup": 1, "retention": 0.0}
RATIOS = {"ratios": (1.0,) + (0.9,) * 63}
GATED = [name for name in rows_of("method") if "threshold" in fields(name) and name not in NO_GATE]
SETTINGS: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in AT_ONCE.items() if key in fields(name)}
    | (RATIOS if name == "magcache" else TABLES.get(name, {}))
    for name in GATED
}


@dataclass(frozen=True)
class All(When):
    """Asks several schedules; each has to compute."""

    whens: tuple[tuple[str, When], ...]
    votes: list[tuple[int, str, bool]]
    of: Probe

    @property
    def probe(self):
        return self.of

    def init(self):
        self.votes.clear()
        return [when.init() for _, when in self.whens]

    def should_compute(self, state, step, probe):
        asked = [
            (step.index, name, when.should_compute(own, step, probe))
            for own, (name, when) in zip(state, self.whens, strict=True)
        ]
        self.votes.extend(asked)
        return all(vote for _, _, vote in asked)

    def computed(self, state, step, probe):
        for own, (_, when) in zip(state, self.whens, strict=True):
            when.computed(own, step, probe)


@dataclass(frozen=True)
class Asked(FeatureMethod):
    """All methods of the catalogue that look at the same probe."""

    methods: tuple[FeatureMethod, ...]
    of: Probe
    votes: list[tuple[int, str, bool]] = field(default_factory=list)

    def parts(self):
        when = All(tuple((m.name, m.parts().when) for m in self.methods), self.votes, self.of)
        return Combine(when, lead=int(self.of == "residual"))

    def abilities(self) -> tuple[Ability, ...]:
        others = [a for m in self.methods for a in m.abilities() if not isinstance(a, Combine)]
        return (*others, self.parts())

    def assert_computed(self) -> None:
        """Every method was asked at every step but the first, and computed it."""
        assert [vote for vote in self.votes if not vote[2]] == []
        assert self.votes and min(index for index, _, _ in self.votes) == 1


def near_zero(*without: str) -> dict[str, Asked]:
    """Return the methods by what they look at, but some.

    The stream after the lead block and its residual are one stream, and who looks at nothing may
    be asked with anyone.
    """
    groups: dict[str, list[FeatureMethod]] = {"residual": [], "modulated": []}
    for name, more in SETTINGS.items():
        if name in without:
            continue
        method = make_method(name, threshold=TINY, **more)
        looks = "modulated" if method.parts().when.probe == "modulated" else "residual"
        groups[looks].append(method)
    return {probe: Asked(tuple(members), probe) for probe, members in groups.items()}
