"""Saving and loading: another process goes on bit for bit; damaged files are refused."""

import copy
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import diffcache.kv
from diffcache.kv import Recipe, cache_for, make_recipe, snapkv
from diffcache.kv.attend import Query
from diffcache.kv.codec.base import Exact, Parts, Payload, TensorCodec, nbytes
from diffcache.kv.codec.joined_heads import JoinHeads
from diffcache.kv.codec.lowrank import LowRank
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.residual import Gear
from diffcache.kv.codec.rotate import ChannelPermute, Hadamard
from diffcache.kv.codec.scaled import ChannelSeparable
from diffcache.kv.codec.sparse import BitmapSparse, Outliers
from diffcache.kv.learn.locret import fresh
from diffcache.kv.life.save import CLASSES, SavedCacheError, _class, _digest, load, read, save, write
from diffcache.kv.segment import Flat, Segment
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore
from tests.kv.life import turns
from tests.kv.tiny import GREEDY, llama, prompts

ROOT = Path(__file__).parents[3]
TURNED = {"rope_type": "default", "rope_theta": 5e5}
ROW = GroupQuant(2, "channels", 8)
ELSEWHERE = {"Lent", "_Chunks"}  # blocks in tiers, not in the cache; a choice of one forward
CODECS: list[TensorCodec] = [
    Exact(torch.bfloat16),
    ROW,
    GroupQuant(3, "tokens", 4),
    ChannelSeparable(ROW),
    Hadamard(ROW),
    ChannelPermute(ROW),
    JoinHeads(ROW),
    LowRank(3),
    BitmapSparse(),
    Outliers(0.2),
    Gear(group=8),
]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(count: int = 6) -> KVStore:
    store = KVStore(2, Recipe("plain"))
    store.begin(count)
    for layer in store.layers:
        layer.write(numbers(1, 2, count, 4), numbers(1, 2, count, 3, seed=1))
    return store


def test_another_process_goes_on_bit_for_bit(model: Any, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {}
    for case, recipe in turns.CASES.items():
        cache = cache_for(model, recipe, mode="native")
        out = model.generate(**prompts(2), past_key_values=cache, **GREEDY)
        text = ";".join(" ".join(map(str, row)) for row in out.sequences.tolist())
        save(tmp_path / f"{case}.safetensors", cache.store, {"sequences": text})
        other = cache_for(model, recipe, mode="native")
        load(tmp_path / f"{case}.safetensors", other.store)  # and in this process: it weighs the same
        for one, two in zip(cache.store.layers, other.store.layers, strict=True):
            a, b = one.read(), two.read()
            assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v) and torch.equal(a.pos, b.pos)
            assert (one.seen, one.held, nbytes(one.segments)) == (two.seen, two.held, nbytes(two.segments))
            assert any(segment.coded for segment in two.segments) is (recipe.codec is not None)
        wanted[case] = turns.second(model, cache, out.sequences)
    command = [sys.executable, "-m", "tests.kv.life.turns", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for case, out in wanted.items():
        found = load_file(tmp_path / f"{case}.out")
        assert torch.equal(found["ids"], out.sequences), case
        assert torch.equal(found["logits"], torch.stack(list(out.logits))), case


def test_every_payload_and_segment_has_a_place_in_the_table() -> None:
    for module in pkgutil.walk_packages(diffcache.kv.__path__, "diffcache.kv."):
        importlib.import_module(module.name)
    for base in (Payload, Parts, Segment):
        for kind in base.__subclasses__():
            if kind.__module__.startswith("diffcache.kv.") and not inspect.isabstract(kind):
                module = kind.__module__.removeprefix("diffcache.kv.")
                found = kind.__name__ in CLASSES.get(module, ())
                assert found != (kind.__name__ in ELSEWHERE), f"{module}.{kind.__name__}"
    for name, kinds in CLASSES.items():
        for kind in kinds:
            assert hasattr(importlib.import_module(f"diffcache.kv.{name}"), kind)
    assert _class("codec.heads.JoinHeads") is JoinHeads  # as older files name it


def test_ragged_rows_and_shared_tensors_survive(tmp_path: Path) -> None:
    x = numbers(2, 2, 5, 4)
    pos = torch.arange(5, dtype=torch.int32).expand(2, 2, -1).clone()
    pos[0, 1, 2:] = -1
    flat = Flat.of(Slots(x, x, {"pos": pos}))
    write(tmp_path / "flat", {"a": flat, "b": (flat.k, flat.k[:3], None, 1.5, torch.float16)})
    found, _ = read(tmp_path / "flat")
    assert torch.equal(found["a"].read().k, flat.read().k)
    assert found["a"].lengths.tolist() == flat.lengths.tolist()
    assert found["b"][0] is found["a"].k  # met twice, held once
    assert torch.equal(found["b"][1], flat.k[:3])
    assert found["b"][2:] == (None, 1.5, torch.float16)


def test_files_that_are_cut_short_or_altered_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, filled())
    whole = path.read_bytes()
    cuts = [whole[:size] for size in (0, 4, 100, len(whole) // 2, len(whole) - 1)]
    places = [*range(0, len(whole), 37), len(whole) - 1]
    altered = [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in places]
    store = filled(2)
    for wrong in cuts + altered:
        path.write_bytes(wrong)
        with pytest.raises(SavedCacheError, match="truncated, altered or no saved cache" if wrong in cuts else None):
            load(path, store)
        assert store.seen == 2  # untouched


def test_other_files_versions_recipes_and_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, store = tmp_path / "x", KVStore(2, Recipe("plain"))
    save_file({"0": torch.zeros(3)}, path)
    with pytest.raises(SavedCacheError, match="is no saved cache"):
        load(path, store)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load(tmp_path / "nothing", store)
    monkeypatch.setattr("diffcache.kv.life.save.VERSION", 2)
    save(path, filled())
    monkeypatch.undo()
    with pytest.raises(SavedCacheError, match="is of version 2, this diffcache reads 1"):
        load(path, store)
    save(path, filled(), {"model": "tiny"})
    with pytest.raises(SavedCacheError, match="this cache is of Recipe"):
        load(path, KVStore(2, Recipe("other")))
    with pytest.raises(SavedCacheError, match="another model"):
        load(path, KVStore(3, Recipe("plain")))
    assert load(path, store) == {"model": "tiny"}
    assert torch.equal(store.layers[1].read().k, filled().layers[1].read().k)
    save(tmp_path / "empty", KVStore(2, Recipe("plain")))
    load(tmp_path / "empty", store)
    assert store.seen == 0 and store.layers[0].held == 0


def test_what_has_no_place_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be saved"):
        write(tmp_path / "x", object())
    with pytest.raises(ValueError, match="strings as keys"):
        write(tmp_path / "x", {1: 2})
    assert not list(tmp_path.iterdir())
    write(tmp_path / "x", 1)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]  # no part is left


def forge(path: Path, change: Any) -> None:
    """Change the content of a saved cache and give it a digest that fits."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["diffcache_kv"])
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = change(header, found) or found
    text = json.dumps(header)
    ordered = [found[name] for name in sorted(found, key=int)]
    save_file(found, path, {"diffcache_kv": text, "blake2b": _digest(text, ordered)})


def entry(node: Any, name: str) -> Any:
    """Return a pair of a folded mapping or dataclass."""
    return next(pair for pair in node.get("dict", node.get("fields")) if pair[0] == name)


def first(header: Any) -> Any:
    return entry(header["tree"], "layers")[1]["list"][0]


def set_entry(node: Any, name: str, value: Any) -> None:
    entry(node, name)[1] = value


def changed(header: Any, found: dict[str, Tensor], change: Any, seen: int = 6) -> dict[str, Tensor]:
    """Change all tensors, and what the header says of them."""
    new = {name: change(tensor).contiguous() for name, tensor in found.items()}
    header["tensors"] = [[str(x.dtype), list(x.shape)] for x in new.values()]
    set_entry(first(header), "seen", seen)
    return new


FORGED = {
    "tensors of other sizes": lambda h, t: changed(h, t, lambda x: x[..., :2], 1),
    "values of another dtype": lambda h, t: changed(h, t, lambda x: x.half() if x.shape[-1] == 3 else x),
    "no tree": lambda h, t: h.pop("tree") and None,
    "no version": lambda h, t: h.pop("version") and None,
    "no recipe": lambda h, t: h["about"].pop("recipe") and None,
    "another tree": lambda h, t: h.update(tree={"list": []}),
    "a tensor that is not there": lambda h, t: set_entry(first(h), "tail", {"tensor": 99}),
    "a number for a tail": lambda h, t: set_entry(first(h), "tail", 3),
    "text for the length": lambda h, t: set_entry(first(h), "seen", "six"),
    "fewer tokens than positions": lambda h, t: set_entry(first(h), "seen", 2),
    "more tokens in one layer": lambda h, t: set_entry(first(h), "seen", 60),
    "no segments": lambda h, t: first(h)["dict"].remove(entry(first(h), "segments")),
    "a number for a segment": lambda h, t: set_entry(first(h), "segments", {"list": [1]}),
    "text for a statistic": lambda h, t: set_entry(first(h), "stats", {"dict": [["mass", "x"]]}),
    "a field that no class has": lambda h, t: entry(first(h), "tail")[1]["fields"].append(["x", 1]),
    "a class that is not allowed": lambda h, t: entry(first(h), "tail")[1].update({"class": "os.x"}),
    "queries that are none": lambda h, t: set_entry(h["tree"], "queries", {"list": [1, 2]}),
    "too few queries": lambda h, t: set_entry(h["tree"], "queries", {"list": []}),
    "text for what was written": lambda h, t: set_entry(h["tree"], "wrote", {"list": ["a", 1]}),
    "something about it that is no mapping": lambda h, t: h["about"].update(about=[1]),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_content_is_refused_with_one_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    save(path, filled())
    forge(path, FORGED[name])
    store = filled(2)
    before = [layer.read() for layer in store.layers]
    with pytest.raises(SavedCacheError):
        load(path, store)
    for layer, slots in zip(store.layers, before, strict=True):
        assert torch.equal(layer.read().k, slots.k) and layer.seen == 2
    store.begin(1)  # and can be gone on from


def test_a_cache_of_a_model_of_other_weights_is_refused(tmp_path: Path) -> None:
    model, other, turned = llama(), llama(seed=1), llama(rope_parameters=TURNED)
    turned.load_state_dict(model.state_dict())
    recipe = Recipe("plain")
    save(tmp_path / "x", cache_for(model, recipe).store)
    for wrong, why in ((other, "weights"), (turned, "rotary embedding")):
        with pytest.raises(SavedCacheError, match=f"is of a model of other {why}: load it"):
            load(tmp_path / "x", cache_for(wrong, recipe).store)
    for right in (copy.deepcopy(model), model.model):
        load(tmp_path / "x", cache_for(right, recipe).store)
    load(tmp_path / "x", KVStore(4, recipe))  # nothing is known of its model
    inject_adapter_in_model(LoraConfig(target_modules=["v_proj"]), model)
    save(tmp_path / "y", cache_for(model, recipe).store)
    model.model.layers[0].self_attn.v_proj.enable_adapters(False)
    with pytest.raises(SavedCacheError, match="is of a model of other adapters: load it"):
        load(tmp_path / "y", cache_for(model, recipe).store)


def test_a_cache_of_other_tables_is_refused(tmp_path: Path) -> None:
    """The `repr` of a recipe says only how large they are."""
    one, two = (make_recipe("locret", heads=fresh(2, 24, 2, width=8, seed=seed)) for seed in range(2))
    save(tmp_path / "x", KVStore(2, one))
    load(tmp_path / "x", KVStore(2, one))
    with pytest.raises(SavedCacheError, match="other tables of locret: load it"):
        load(tmp_path / "x", KVStore(2, two))


def test_parts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """Kept queries of fewer channels are in order until they score the prompt, at the next token."""
    path, recipe = tmp_path / "x.safetensors", snapkv(4, window=2)
    store = KVStore(2, recipe)
    store.begin(6)
    for index, layer in enumerate(store.layers):
        layer.write(numbers(1, 2, 6, 4), numbers(1, 2, 6, 3, seed=1))
        store.attend(index, Query(numbers(1, 2, 6, 4, seed=2), 0, 1.0))
    save(path, store)
    load(path, KVStore(2, recipe))

    def change(header: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
        queries = entry(header["tree"], "queries")[1]["list"][0]
        place = str(entry(queries, "q")[1]["tensor"])
        found[place] = found[place][..., :-1].contiguous()
        header["tensors"][int(place)] = [str(found[place].dtype), list(found[place].shape)]
        return found

    forge(path, change)
    other = KVStore(2, recipe)
    with pytest.raises(SavedCacheError, match="holds what no cache holds"):
        load(path, other)
    assert other.seen == 0
