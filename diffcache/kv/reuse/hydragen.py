"""Hydragen: a prefix that all rows share is held once, and attended to once for all of them."""

from __future__ import annotations

from diffcache.kv.segment import Dense, Traits
from diffcache.kv.store import KVStore
from diffcache.kv.tail import Tail

_ONCE = Traits(apart=True)


def hydragen(store: KVStore) -> None:
    """Make what a store of one row holds the prefix of as many rows as come.

    The queries of all rows meet the prefix in one product; the attention to it and to what each
    row adds are merged by log-sum-exp. Later tokens may have any number of rows. Layers that are
    not in the store, such as sliding ones, are left as they are.

    Reference: Hydragen, arXiv 2402.05099.

    Args:
        store: Store of one row, all of which is exact; changed in place.

    Raises:
        ValueError: If it has more rows than one, is empty, or holds coded slots.
    """
    for layer in store.layers:
        coded = any(segment.coded for segment in layer.segments)
        if not layer.held or coded or len(layer.read().k) != 1:
            raise ValueError(
                f"layer {layer.index} holds {layer.held} slots: a shared prefix is one row of exact"
                " slots; prefill it once, and do not quantize it"
            )
    for layer in store.layers:
        layer.segments = [Dense(layer.read().clone(), _ONCE, below=layer.seen)]
        layer.tail = Tail(layer.seen)
        layer.stats, layer.summary = {}, None
