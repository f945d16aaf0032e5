"""Save caches and load them in another process, bit for bit; altered files are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffcache.digest import digest
from diffcache.errors import DiffcacheError
from diffcache.kv.attend import Query, attend
from diffcache.kv.codec.base import tensors
from diffcache.kv.layer import Form, KVLayer, LayerSummary
from diffcache.kv.rotary_nd import RotaryTable
from diffcache.kv.segment import Segment
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore
from diffcache.kv.tail import Tail

VERSION = 1
_HEADER, _DIGEST = "diffcache_kv", "blake2b"
# What a saved cache may be made of. Nothing else is ever built from a file.
CLASSES: dict[str, tuple[str, ...]] = {
    "attend": ("Query",),
    "slots": ("Slots",),
    "segment": ("Traits", "Dense", "Flat", "Coded"),
    "codec.base": ("Dense", "Exact"),
    "codec.fourier": ("Spectrum", "FourierSigns", "SplitChannels", "RangeSplit"),
    "codec.joined_heads": ("JoinedHeads", "JoinHeads"),
    "codec.lowrank": ("Factors", "LowRank", "Projected", "StaticLowRank"),
    "codec.quant": ("Quantized", "GroupQuant"),
    "codec.remat": ("Void", "Delta"),
    "codec.residual": ("Geared", "Gear"),
    "codec.rotate": ("Rotated", "Hadamard", "Permuted", "ChannelPermute"),
    "codec.scaled": ("Scaled", "ChannelSeparable", "Balanced"),
    "codec.shared": ("Directed",),
    "codec.sparse": ("Bitmap", "BitmapSparse", "Scattered", "Outliers"),
    "codec.table": ("SlotTable",),
    "retrieval.shadowkv": ("Patched",),
    "retrieval.summary": ("Summary",),
    "reuse.cachecraft": ("Chunk",),
    "reuse.piece": ("Piece",),
}
_RENAMED = {"codec.heads": "codec.joined_heads"}  # modules as older files name them
_PACKAGE = "diffcache.kv."


class SavedCacheError(DiffcacheError, ValueError):
    """A saved cache cannot be read, or is not of this model and recipe."""


def save(path: str | os.PathLike[str], store: KVStore, about: Mapping[str, str] | None = None) -> None:
    """Write all that a store holds into one file of safetensors.

    Queries, statistics of scorers and what retrievers know are in it, so that a recipe goes on as
    it would have. Layers of a cache that are not in its store, such as sliding ones, are not.

    Args:
        path: Path of the file, which is replaced at once or not at all.
        store: Store that is written, in the layouts and codes it is held in.
        about: Texts that `load` gives back, such as the name of the model.

    Raises:
        ValueError: If something in the store has no place in such a file.
    """
    _check_store(store)
    if any(isinstance(layer.rotary, RotaryTable) for layer in store.layers):
        raise ValueError(
            "keys are held before a rotation whose positions are looked up by token, and have no "
            "place in such a file; save a cache that holds keys as they are (space='post')"
        )
    state = store.state()
    state["layers"] = [
        {
            "seen": layer.seen,
            "padding": layer.padding,
            "segments": layer.segments,
            "tail": layer.tail.read(),
            "start": layer.tail.start,
            "whole": layer.tail.whole,
            "stats": layer.stats,
            "summary": layer.summary,
        }
        for layer in store.layers
    ]
    said = {"recipe": repr(store.recipe), "tables": _tables(store), "origin": dict(store.origin())}
    said["about"] = dict(about or {})
    write(path, state, said)


def load(path: str | os.PathLike[str], store: KVStore, device: str | torch.device = "cpu") -> dict[str, str]:
    """Fill a store with what `save` wrote, and return what was said about it.

    Args:
        path: Path of the file.
        store: Store of the same model and recipe; what it holds is forgotten.
        device: Device that the tensors go to.

    Raises:
        SavedCacheError: If the file is truncated, altered, or of another recipe or model; the store
            is then as it was.
        ValueError: If `store` is none.
    """
    _check_store(store)
    state, header = read(path, device)
    with refusing(path):
        _check_origin(path, header, store)
        loaded = _filled(state, store)
        _rehearse(loaded, state["queries"])
        about = {str(name): str(text) for name, text in header["about"].items()}
    store.reset()
    for layer, other in zip(store.layers, loaded.layers, strict=True):
        layer.__dict__.update(other.__dict__)
    store.restore(state)
    return about


def _check_store(store: object) -> None:
    if not isinstance(store, KVStore):
        raise ValueError(f"store: is a {type(store).__name__}; of a cache of cache_for(model, ...) give cache.store")


def _tables(store: KVStore) -> str:
    """Return a digest of the tensors of a recipe, which its `repr` shortens."""
    return digest(list(tensors(store.recipe)))


def _check_origin(path: str | os.PathLike[str], header: Mapping[str, Any], store: KVStore) -> None:
    """Refuse what was saved by another recipe, or of another model as far as both are known."""
    if header["recipe"] != repr(store.recipe):
        raise SavedCacheError(f"{path} was saved with {header['recipe']}; this cache is of {store.recipe!r}")
    tables = _tables(store)
    if header.get("tables", tables) != tables:
        raise SavedCacheError(
            f"{path} was saved with other tables of {store.recipe.name}: load it into a cache of those"
        )
    theirs, ours = header.get("origin", {}), store.origin()
    other = [name for name in theirs if name in ours and theirs[name] != ours[name]]
    if other:
        raise SavedCacheError(
            f"{path} is of a model of other {' and '.join(other)}: load it into a cache of the "
            "model that it was saved with"
        )


def _filled(state: Mapping[str, Any], like: KVStore) -> KVStore:
    """Return a new store that holds what was saved, all of it read and checked once; `like` is left alone.

    Raises:
        SavedCacheError: If it has another number of layers.
        ValueError: If parts do not go together.
    """
    saved = state["layers"]
    if len(saved) != len(like.layers):
        raise SavedCacheError(
            f"{len(saved)} layers were saved, this cache has {len(like.layers)}: it is of another model"
        )
    found = [x.rotary if x.mover is None else x.mover.rotation for x in like.layers]
    rotary = [each for each in found if each is not None]
    store = KVStore(len(saved), like.recipe, rotary=rotary or None, out=like.out, read_once=like.read_once)
    for layer, each, ours in zip(store.layers, saved, like.layers, strict=True):
        layer.latent = ours.latent
        _fill(layer, each)
        if layer.form is not None and ours.form is not None and layer.form[1:4] != ours.form[1:4]:
            form, held = layer.form[1:4], ours.form[1:4]
            raise ValueError(f"keys and values of [H, D, Dv]={form}: this cache held {held}")
    store.restore(state)
    fresh = state["fresh"]
    kinds = [*zip(state["queries"], [Query | None] * len(saved), strict=True)]
    _check_kinds([*kinds, *((count, int) for count in state["wrote"]), (fresh, bool)])
    known = {layer.form[:1] + layer.form[4:] for layer in store.layers if layer.form is not None}
    if len({layer.seen for layer in store.layers}) > 1 or len(known) > 1:
        raise ValueError("layers hold different numbers of tokens, rows or kinds of numbers")
    return store


def _rehearse(loaded: KVStore, queries: list[Query | None]) -> None:
    """Take two tokens of zeros in a copy of what was loaded; its last queries tell how many heads ask.

    Parts that are each in order may not go together (a grid of too few groups, a summary of other
    slots, statistics that a score does not know), which shows when a token is read.

    Raises:
        Exception: Whatever a forward after loading would raise.
    """
    trial = loaded.fork()
    for _ in range(2):
        if not trial.taken_over:  # else one token would be too few queries to score by
            trial.begin(1)
        for layer, query in zip(trial.layers, queries, strict=True):
            form = layer.form
            if form is None:  # nothing was saved
                return
            kind: dict[str, Any] = {"dtype": form.dtype, "device": form.device}
            layer.write(
                torch.zeros(form.batch, form.heads, 1, form.size, **kind),
                torch.zeros(form.batch, form.heads, 1, form.value_size, **kind),
            )
            views = layer.views()
            heads = form.heads if query is None else query.q.shape[1]
            q = torch.zeros(form.batch, heads, 1, views[0].slots.k.shape[3], **kind)
            attend(Query(q, layer.seen - 1, 1.0), views)


def _fill(layer: KVLayer, saved: Mapping[str, Any]) -> None:
    """Have an empty layer hold what was saved; raise ValueError if parts do not go together."""
    layer.seen, layer.padding = saved["seen"], saved["padding"]
    layer.segments, layer.stats = saved["segments"], saved["stats"]
    layer.summary = saved["summary"]
    kinds: list[tuple[object, Any]] = [(layer.seen, int), (layer.padding, Tensor | None)]
    kinds += [(layer.segments, list), (layer.stats, dict), (layer.summary, LayerSummary | None)]
    kinds += [(segment, Segment) for segment in layer.segments]
    kinds += [(tensor, Tensor) for tensor in layer.stats.values()]
    _check_kinds(kinds)
    slots = saved["tail"]
    if slots is None or not slots.width:
        layer.tail = Tail(layer.seen if saved["start"] is None else saved["start"])
    else:
        layer.tail = Tail.of(slots)
        layer.tail.whole &= saved.get("whole", True)  # attention goes on by the same kernel
    if not layer.held:
        return
    whole = layer.read() if layer.latent else layer.rotated(layer.read())
    layer.form = Form.of(whole.k, whole.v)
    shape = (layer.form.batch, layer.form.heads, layer.held)
    fits = shape == whole.k.shape[:3] == whole.v.shape[:3] and int(whole.pos.max()) < layer.seen
    fits &= whole.k.dtype == whole.v.dtype and whole.k.is_floating_point()
    fits &= all(_is_even(each, shape) for each in (whole, *(x.read() for x in layer.segments)))
    fits &= layer.padding is None or layer.padding.shape == shape[:1]
    for tensor in layer.stats.values():  # of the slots that were scored
        fits &= tensor.shape[:2] == shape[:2] and tensor.shape[2] <= layer.held
    if not fits:
        raise ValueError(f"keys, values, positions and statistics do not fit {list(shape)} slots")


def _is_even(slots: Slots, shape: tuple[int, int, int]) -> bool:
    """Return whether all that is said of slots is of as many rows, heads and slots."""
    batch, heads, _ = shape
    columns = [slots.k[..., 0], slots.v[..., 0], *slots.meta.values()]
    wanted = {(b, h, slots.width) for b in (1, batch) for h in (1, heads)}
    return wanted.issuperset(tuple(column.shape) for column in columns)


def _check_kinds(kinds: list[tuple[object, Any]]) -> None:
    wrong = [type(item).__name__ for item, kind in kinds if not isinstance(item, kind)]
    if wrong:
        raise ValueError(f"there is {', '.join(wrong)} where something else belongs")


@contextmanager
def refusing(path: str | os.PathLike[str], kind: str = "cache") -> Iterator[None]:
    """Turn whatever goes wrong with the content of a file into one error.

    Args:
        path: Path of the file, or of the folder that it is in.
        kind: Word for what was saved.

    Raises:
        FileNotFoundError: If a file is not there.
        SavedCacheError: If anything else goes wrong.
    """
    try:
        yield
    except (SavedCacheError, FileNotFoundError):
        raise
    except Exception as error:
        raise SavedCacheError(
            f"{os.fspath(path)} holds what no {kind} holds ({type(error).__name__}: {error}); save it again"
        ) from error


def write(path: str | os.PathLike[str], item: object, about: Mapping[str, Any] | None = None) -> None:
    """Write anything made of tensors, plain values and the classes of a cache into one file.

    Args:
        path: Path of the file, which is replaced at once or not at all.
        item: Object that is written.
        about: Plain values that are written beside it.

    Raises:
        ValueError: If `item` holds something else.
    """
    folded = fold(item)
    tensors = [[str(x.dtype), list(x.shape)] for x in folded.tensors]
    said = {"version": VERSION, "about": dict(about or {}), "tree": folded.tree}
    header = json.dumps(said | {"tensors": tensors})
    found = {str(number): tensor for number, tensor in enumerate(_apart(folded.tensors))}
    digest = _digest(header, list(found.values()))
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        save_file(found, part, {_HEADER: header, _DIGEST: digest})
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> tuple[Any, dict[str, Any]]:
    """Return what `write` wrote, and what was written beside it.

    Args:
        path: Path of the file.
        device: Device that the tensors go to.

    Raises:
        FileNotFoundError: If there is no such file.
        SavedCacheError: If the file is truncated or altered, or not one of these.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file; save a cache there first")
    try:
        with safe_open(os.fspath(path), "pt") as file:
            about = file.metadata() or {}
            names = sorted(file.keys(), key=int) if _HEADER in about else []
            found = [file.get_tensor(name) for name in names]
    except (SafetensorError, ValueError) as error:
        raise SavedCacheError(f"{path} is truncated, altered or no saved cache ({error}); save it again") from error
    if _HEADER not in about:
        raise SavedCacheError(f"{path} is no saved cache; give a file that `save` wrote")
    if _digest(about[_HEADER], found) != about.get(_DIGEST):
        raise SavedCacheError(f"{path} was altered: its digest differs; save it again")
    moved = [tensor.to(device) for tensor in found]
    with refusing(path):
        header = json.loads(about[_HEADER])
        if header["version"] != VERSION:
            raise SavedCacheError(f"{path} is of version {header['version']}, this diffcache reads {VERSION}")
        kinds = [[str(x.dtype), list(x.shape)] for x in found]
        if kinds != header["tensors"]:
            raise SavedCacheError(f"{path} was altered: its tensors have other shapes; save it again")
        return unfold(Folded(header["tree"], moved)), dict(header["about"])


def _apart(given: list[Tensor]) -> list[Tensor]:
    """Return contiguous tensors on the CPU, none of which shares memory with another."""
    used: set[int] = set()
    found = []
    for tensor in given:
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in used:
            plain = plain.clone()
        used.add(plain.untyped_storage().data_ptr())
        found.append(plain)
    return found


def _digest(header: str, found: list[Tensor]) -> str:
    digest = blake2b(header.encode(), digest_size=32)
    for tensor in found:
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass
class Folded:
    """Plain values that json can write, and the tensors they refer to by number."""

    tree: Any
    tensors: list[Tensor]


def fold(item: object) -> Folded:
    """Take something apart.

    A tensor that is met twice is listed once.

    Args:
        item: Tensors, numbers, strings, None, dtypes, tuples, lists, mappings with strings as
            keys, and dataclasses of `CLASSES`.

    Raises:
        ValueError: If it holds something else, naming it.
    """
    found: list[Tensor] = []
    numbers: dict[tuple[Any, ...], int] = {}

    def walk(item: Any) -> Any:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, Tensor):
            key = (item.device, item.data_ptr(), item.dtype, item.shape, item.stride())
            if key not in numbers or not item.numel():
                numbers[key] = len(found)
                found.append(item)
            return {"tensor": numbers[key]}
        if isinstance(item, torch.dtype):
            return {"dtype": str(item).removeprefix("torch.")}
        if isinstance(item, (tuple, list)):
            return {"tuple" if isinstance(item, tuple) else "list": [walk(x) for x in item]}
        if isinstance(item, dict):
            return {"dict": [[_key(name), walk(value)] for name, value in item.items()]}
        name = _name(item)
        values = [[field.name, walk(getattr(item, field.name))] for field in fields(item)]
        return {"class": name, "fields": values}

    return Folded(walk(item), found)


def unfold(folded: Folded) -> Any:
    """Put together what `fold` took apart; raise ValueError if it names a class that is not in `CLASSES`."""

    def walk(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            return folded.tensors[node["tensor"]]
        if "dtype" in node:
            return _dtype(node["dtype"])
        if "tuple" in node:
            return tuple(walk(x) for x in node["tuple"])
        if "list" in node:
            return [walk(x) for x in node["list"]]
        if "dict" in node:
            return {name: walk(value) for name, value in node["dict"]}
        return _class(node["class"])(**{name: walk(value) for name, value in node["fields"]})

    return walk(folded.tree)


def _name(item: object) -> str:
    """Return the name of an allowed class."""
    kind = type(item)
    module = kind.__module__.removeprefix(_PACKAGE)
    if not is_dataclass(item) or kind.__name__ not in CLASSES.get(module, ()):
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} cannot be saved: only tensors, plain values "
            "and the classes listed in diffcache.kv.life.save can"
        )
    return f"{module}.{kind.__name__}"


def _class(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    module = _RENAMED.get(module, module)
    if kind not in CLASSES.get(module, ()):
        raise ValueError(f"{name!r} is no class that a saved cache is made of")
    return getattr(import_module(_PACKAGE + module), kind)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return found


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"key {name!r}: only mappings with strings as keys can be saved")
    return name
