"""Feature reuse: any schedule with any forecast at any site, as an ability and as a method."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from diffcache.features.base import Ability, Instead, Method, When
from diffcache.features.parts.instead import Reuse
from diffcache.ranges import Settings, Such, Whole
from diffcache.step import Site


class FeatureMethod(Settings, Method):
    """A method that reuses features, and says in `parts` when, what instead and where.

    This is all that most methods ask for; one that asks for more extends `abilities`. The parts
    check their own numbers, so that a method is made of good ones or not at all.

    Examples:
        >>> pipe = diffcache.wrap(pipe, TaylorSeer(every=5))  # doctest: +SKIP
    """

    def check(self) -> None:
        """Raise ValueError unless there are such parts."""
        self.parts()

    @abstractmethod
    def parts(self) -> Combine:
        """Return the schedule, the stand-in and the site that make up the method; raise ValueError for unfit ones."""

    def abilities(self) -> tuple[Ability, ...]:
        """Return the method's feature reuse, behind what its schedule needs."""
        parts = self.parts()
        return (*parts.when.needs, parts)


@dataclass(frozen=True)
class Combine(FeatureMethod, Ability):
    """Reuse features: an ability, and a method put together in a line.

    Args:
        when: Schedule of computed steps, such as `Every(4)`, `Listed([0, 5, 9])` or `Gate(0.1)`.
        instead: Stand-in for a skipped feature, such as `Reuse()`, `Taylor(1)` or `Newton(2)`.
        site: Site of the features, a `Site` or its name.
        lead: Blocks at the start of the stack that always run; a gate needs at least 1. At `deep`
            on a UNet they are layers, of which `conv_in` is the first and runs in any case.
        tail: Blocks at the end of the stack that always run; at `deep` on a UNet, layers, of which
            the last runs in any case. `lead=b+1, tail=b+1` is branch `b` of DeepCache (arXiv
            2312.00858, section 3.3).
        blocks: With `site="run"`, the blocks to cache: names such as `transformer_blocks.3` or
            ranges, both ends included, such as `transformer_blocks.2-9`.
        feature: At `stack` and `run`: keep the `residual` of every list or the `output` of the
            last cached block (one tensor a stream, whatever the depth). At `model`: `change`
            keeps the output less the sample that the denoiser was given, `guidance` less that of
            the first guidance branch in the same step (which keeps its own), anything else the
            output.

    Raises:
        ValueError: If a part does not fit the others.

    Examples:
        >>> Combine(when=Every(4, warmup=2), instead=Newton(2), site="stack")  # doctest: +SKIP
    """

    name: ClassVar[str] = "combine"

    when: Annotated[When, Such("Every(4)")]
    instead: Annotated[Instead, Such("Taylor(1)")] = field(default_factory=Reuse)
    site: Site | str = Site.STACK
    lead: Whole = 0
    tail: Whole = 0
    blocks: tuple[str, ...] | str = ()
    feature: Literal["residual", "output", "change", "guidance"] = "residual"

    def check(self) -> None:
        """Raise ValueError if a part does not fit the others."""
        site = Site.of(self.site)
        object.__setattr__(self, "site", site)
        if self.feature in ("change", "guidance") and site is not Site.MODEL:
            raise ValueError(f"feature={self.feature!r} with site={site.value!r}: is for site 'model'")
        if isinstance(self.blocks, str):
            object.__setattr__(self, "blocks", (self.blocks,))
        if (site is Site.RUN) != bool(self.blocks):
            raise ValueError(
                f"blocks={self.blocks!r} with site={site.value!r}: name the blocks of site 'run', "
                "such as 'transformer_blocks.2-9', and of no other site"
            )
        if self.when.sites and site in (Site.MODEL, Site.STACK, Site.DEEP):
            raise ValueError(
                f"when={type(self.when).__name__} with site={site.value!r}: only blocks, runs of "
                "blocks and modules inside them decide apart"
            )
        if self.when.probe in ("residual", "output") and self.lead == 0:
            raise ValueError(f"lead=0 with when={self.when!r}: a gate looks at lead blocks; set lead=1")
        if site.is_module and (self.lead or self.tail or self.when.waits):
            raise ValueError(
                f"lead={self.lead}, tail={self.tail}: must be 0 at site {site.value!r}, and the "
                f"schedule no gate ({self.when!r})"
            )

    def parts(self) -> Combine:
        """Return itself."""
        return self


def reuse_of(method: Method) -> Combine | None:
    """Return the feature reuse of a method, None where it asks for none."""
    return next((a for a in method.abilities() if isinstance(a, Combine)), None)


def goes_in_place(new: Method, old: Method) -> bool:
    """Return whether a method differs from another in its schedule and its stand-in alone."""
    pairs = list(zip(new.abilities(), old.abilities(), strict=False))
    same = new.total == old.total and len(new.abilities()) == len(old.abilities())
    for made, had in pairs:
        if isinstance(made, Combine) and isinstance(had, Combine):
            a, b = made.when, had.when
            looks = (a.probe, a.sites, a.by_branch, a.total) == (b.probe, b.sites, b.by_branch, b.total)
            same = same and looks and replace(made, when=b, instead=had.instead) == had
        else:
            same = same and made == had
    return same
