"""A layer that holds codes, as recipes of KIVI's kind do, and queries of its newest tokens."""

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary import Rotary

SIZE = 64


def pair(*, bits: float = 2, slide: bool = True, sinks: int = 0) -> Pair:
    """Return a codec of keys along tokens and of values along channels."""
    keys, values = GroupQuant(bits, "tokens", 32), GroupQuant(bits, "channels", 32)
    return Pair(keys, values, 32, slide=slide, sinks=sinks)


def layer(codec: Pair, tokens: int, dtype: torch.dtype, batch: int = 2, rotary: Rotary | None = None) -> KVLayer:
    """Return a layer with tokens that were coded as they came."""
    made, random = KVLayer(rotary=rotary), torch.Generator().manual_seed(tokens)
    for count in (tokens - 3, 1, 1, 1):
        k, v = torch.randn(2, batch, 2, count, SIZE, generator=random).to(dtype)
        made.write(k, v)
        codec.flush([made])
    return made


def query(held: KVLayer, count: int = 1, **settings: object) -> Query:
    """Return queries of the newest tokens."""
    assert held.form is not None
    random = torch.Generator().manual_seed(9)
    q: Tensor = torch.randn(held.form.batch, 6, count, SIZE, generator=random).to(held.form.dtype)
    return Query(q, held.seen - count, SIZE**-0.5, **settings)  # type: ignore[arg-type]
