"""Keep the outputs of a pipeline's text encoders from call to call, exact and in bounded memory."""

from __future__ import annotations

import copy
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.anchor import described, owner_of
from diffcache.attach.pipeline_hooks import tap_encoder, untap
from diffcache.attach.signature import Contents, Same, others_in, tensors_in
from diffcache.attach.tree import leaves
from diffcache.errors import AttachError
from diffcache.foreign import (
    attention_names,
    count_hooks,
    device_of_model,
    is_compiled,
    is_compiled_in_place,
    weights_of,
)
from diffcache.method import check_int
from diffcache.weights import all_of

# Components that see the prompt alone: encoders, and what LTX 2 puts behind its own.
_NAMES = re.compile(r"text_encoder(_\d+)?|connectors")
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class TextCounts:
    """Counts of a text cache since its pipeline was wrapped.

    Attributes:
        looked_up: Calls of text encoders that were answered from the cache.
        computed: Calls that ran.
        held_bytes: Bytes of the outputs that are held now.
        limit_bytes: Most bytes that may be held.
        passed_over: Why the last call that ran was not kept; empty where it was.
    """

    looked_up: int
    computed: int
    held_bytes: int
    limit_bytes: int
    passed_over: str


class TextCache:
    """Outputs of the text encoders of one pipeline, by the contents of all arguments.

    A call is answered from the cache if every argument is the same bit for bit, and the encoder is
    as it was: its weights are summed at every call, and adapters, their scales, settings, hooks,
    dtype and device are compared; a change drops everything that the encoder returned. Each caller
    gets a copy of its own, with the strides and shared memory of the output. A batch of prompts is
    one call: rows are not kept apart, since a batch of another size rounds otherwise.

    The table is under a lock, the encoder is not: two threads that ask for one text at once may
    both compute it.

    Args:
        pipeline: A diffusers pipeline.
        limit_bytes: Most bytes to hold; outputs that were not asked for longest go first.

    Raises:
        AttachError: If the pipeline has no text encoder, or one that cannot be looked at.
        ValueError: If the limit is no whole number of 1 or more.
    """

    def __init__(self, pipeline: Any, limit_bytes: int) -> None:
        check_int("text_bytes", limit_bytes, 1)
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._held = self._looked_up = self._computed = 0
        self._passed_over = ""
        self._encoders: dict[str, _Encoder] = {}
        try:
            for name, encoder in _encoders_of(pipeline).items():
                self._encoders[name] = _Encoder(name, encoder)
                tap_encoder(encoder, self)
        except BaseException:
            self.detach()
            raise

    def answer(self, encoder: nn.Module, run: Callable[[], Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a call of an encoder, kept or computed: `run` runs it with these arguments."""
        known = next((e for e in self._encoders.values() if e.model is encoder), None)
        why = "it is unwrapped" if known is None else known.unfit()
        given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        tensors, others = tensors_in(given), others_in(given)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
            why = why or "gradients are on"
        if any(isinstance(value, Same) for _, value in others):
            why = why or "an argument is neither a tensor, a number nor a text"
        if known is None or why:
            return self._ran(run(), why)
        kinds = tuple((name, type(value)) for name, value in given.items())
        key = known.name, kinds, others, _contents(tensors), _surroundings(encoder)
        with self._lock:
            if known.weights.changed(True):
                self._drop(known)
            version, kept = known.version, self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                self._looked_up += 1
        if kept is not None:
            return copy.deepcopy(kept[0])
        out = run()
        made = _copied(out)
        if made is None:
            return self._ran(out, "its output holds more than tensors, or gradients")
        with self._lock:
            if made[1] > self.limit_bytes:
                why = f"its output has {made[1]} bytes, more than text_bytes={self.limit_bytes}"
            elif known.version == version and self._encoders.get(known.name) is known:
                self._keep(key, made)
        return self._ran(out, why)

    def _ran(self, out: Any, why: str) -> Any:
        with self._lock:
            self._computed += 1
            self._passed_over = why
        return out

    def _keep(self, key: Any, made: tuple[Any, int]) -> None:
        """Keep an output, in the place of those that were not asked for longest."""
        _, before = self._kept.pop(key, (None, 0))  # another thread's
        self._held += made[1] - before
        self._kept[key] = made
        while self._held > self.limit_bytes:
            _, (_, size) = self._kept.popitem(last=False)
            self._held -= size

    def _drop(self, known: _Encoder) -> None:
        """Forget the outputs of an encoder that changed."""
        known.version += 1
        known.weights = all_of(known.model)
        for key in [key for key in self._kept if key[0] == known.name]:
            self._held -= self._kept.pop(key)[1]

    def counts(self) -> TextCounts:
        """Return the counts of calls and bytes so far."""
        with self._lock:
            return TextCounts(self._looked_up, self._computed, self._held, self.limit_bytes, self._passed_over)

    def clear(self) -> None:
        """Forget every output."""
        with self._lock:
            self._kept.clear()
            self._held = 0

    def detach(self) -> None:
        """Leave the encoders as they were found."""
        encoders, self._encoders = self._encoders, {}
        for known in encoders.values():
            untap(known.model, self)
        self.clear()


class _Encoder:
    """One text encoder: its weights as they were seen, and how often they changed since."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model, self.version = name, model, 0
        owner = owner_of(model)
        if owner is not None:
            what = "another pipeline's texts" if isinstance(owner, TextCache) else described(owner)
            raise AttachError(f"text_bytes: {name} is held by {what} already; unwrap that, or leave it out")
        if is_compiled(model) and not is_compiled_in_place(model):
            raise AttachError(
                f"text_bytes: {name} is compiled by torch.compile(...); compile it in place, "
                f"pipe.{name}.compile(), or leave text_bytes out"
            )
        try:
            self.weights = all_of(model)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise AttachError(
                f"text_bytes: the weights of {name} cannot be read, so a change of them would not "
                f"be seen ({str(error)[:200]}); leave it out"
            ) from error

    def unfit(self) -> str:
        """Return why a call cannot be looked up now; empty where it can."""
        grad = torch.is_grad_enabled()
        for module in self.model.modules():
            if module.training:
                return "it is in training mode"
            if any(count_hooks(module)):
                return "it has forward hooks, which would not run"
            for _, weight in weights_of(module):
                if weight is not None and weight.is_meta:
                    return "its weights are elsewhere until it runs, as under sequential offload"
                if grad and weight is not None and weight.requires_grad:
                    return "gradients are on"
        return ""


def _encoders_of(pipeline: Any) -> dict[str, nn.Module]:
    """Return the text encoders of a pipeline by name; raise AttachError if there is none."""
    parts = {} if isinstance(pipeline, nn.Module) else getattr(pipeline, "components", {})
    found = {name: part for name, part in parts.items() if _NAMES.fullmatch(name) and isinstance(part, nn.Module)}
    if not found:
        raise AttachError(f"text_bytes: this {type(pipeline).__name__} has no text encoder; leave it out")
    return found


def _contents(tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """Return a hashable key of tensors by their paths: looks and contents."""
    contents = Contents()
    return tuple((path, t.shape, t.stride(), t.dtype, t.device, contents.of(t)) for path, t in tensors.items())


def _surroundings(encoder: nn.Module) -> Any:
    """Return a hashable key of device, dtype and settings, on which an output depends too."""
    device = device_of_model(encoder)
    cast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    configs = [
        [(name, value) for name, value in vars(config).items() if isinstance(value, _PLAIN)]
        for config, _ in attention_names(encoder)
    ]
    return device, cast, torch.get_float32_matmul_precision(), repr(configs)


def _copied(out: Any) -> tuple[Any, int] | None:
    """Return a copy of an output with its bytes, None if it cannot be copied whole.

    Key-value caches that language models return are copied with it.
    """
    if not _is_data(out) or any(t.requires_grad for t in leaves(out)):
        return None
    memo: dict[int, Any] = {}
    with torch.inference_mode(False):
        made = copy.deepcopy(out, memo)
    storages = [v.untyped_storage() for v in memo.values() if isinstance(v, Tensor)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return made, sum(sizes.values())


def _is_data(value: Any) -> bool:
    """Return whether a value is made of tensors, plain data and caches of transformers alone."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    is_cache = type(value).__module__ == "transformers.cache_utils"
    return isinstance(value, (Tensor, *_PLAIN)) or is_cache
