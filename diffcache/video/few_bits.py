"""Any policy with its older frames in few bits."""

from __future__ import annotations

from dataclasses import dataclass, field

from diffcache.kv.attend import Query
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.quantized import kivi
from diffcache.kv.store import KVStore
from diffcache.ranges import Count
from diffcache.video.policy import VideoPolicy
from diffcache.video.window import Window


@dataclass(frozen=True)
class Quantized(VideoPolicy):
    """Hold the frames of another policy, and code them by KIVI as they grow old.

    Keys are coded before rotation, `recent` frames or more at once, so that up to twice as many are
    exact; values are coded as they leave the latest `recent` frames. Sinks are coded as well.

    Args:
        policy: Frames that are held.
        bits: Bits of a code: 1, 2, 3, 4 or 8.
        recent: Latest frames that stay exact.
        group: Tokens of a group of keys, channels of a group of values.

    Raises:
        ValueError: If the policy puts frames into another order.

    Reference: KIVI, arXiv 2402.02750, section 3.3. Departure: the paper codes rotated keys of
    language models.
    """

    policy: VideoPolicy = field(default_factory=Window)
    bits: int = 4
    recent: Count = 3
    group: Count = 32

    def check(self) -> None:
        """Raise ValueError unless frames of the policy stay where they are."""
        if type(self.policy).begin is not VideoPolicy.begin:
            raise ValueError(
                f"policy={self.policy!r}: puts frames into another order, for which codes would be "
                "undone at every chunk; give a policy that drops frames where they stand"
            )
        object.__setattr__(self, "sinks", self.policy.sinks)
        object.__setattr__(self, "by_query", self.policy.by_query)
        object.__setattr__(self, "by_head", self.policy.by_head)
        self.recipe(self.group)

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe of the policy with the codec."""
        residual = -(-self.recent * unit // self.group) * self.group
        return self.policy.recipe(unit) | kivi(self.bits, group=self.group, residual=residual)

    def first_step(self, store: KVStore, index: int, query: Query) -> None:
        """Act as the inner policy does."""
        self.policy.first_step(store, index, query)
