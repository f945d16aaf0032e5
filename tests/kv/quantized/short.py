"""Generate in short, with a cache and without."""

from __future__ import annotations

from typing import Any

from diffcache.kv.hf.cache import detach
from tests.kv.tiny import GREEDY, prompts, row

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 16},
    "assisted": {"prompt_lookup_num_tokens": 3},
}
SHORT = {**GREEDY, "max_new_tokens": 6}


def generate(model: Any, cache: Any, inputs: Any, **settings: Any) -> Any:
    return model.generate(**inputs, past_key_values=cache, **SHORT, **settings)


def stock(model: Any, inputs: Any, **settings: Any) -> Any:
    detach(model)
    return model.generate(**inputs, **SHORT, **settings)


def given(way: str) -> Any:
    return row(prompts(), 0) if way == "assisted" else prompts()
