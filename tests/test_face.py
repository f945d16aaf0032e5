"""Public names of `import diffcache`, and one pair of verbs for caches of every kind."""

import copy
import io
import pkgutil
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import diffcache
from diffcache import AttachError, kv
from diffcache.dllm import DKVCache, Schedule
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.registry import WORDS, rows_of
from diffcache.video import DeepForcing, FullHistory, Window, make_policy
from tests.dllm.toys import MASK, bidirectional
from tests.kv.tiny import GREEDY, ONE, llama, same
from tests.video.toys import SIZE, text, wan

SNAP = {"budget": 12, "window": 4}


def test_what_is_shown_is_there_and_no_module_hides_behind_a_function() -> None:
    assert set(dir(diffcache)) == {*diffcache.__all__, "__version__"}
    for name in diffcache.__all__:
        assert getattr(diffcache, name) is not None
    for row in rows_of("method").values():
        assert row.load().__name__ in diffcache.__all__
    assert set(diffcache.methods()) == set(rows_of("method"))
    modules = {found.name for found in pkgutil.iter_modules(diffcache.__path__)}
    assert modules & set(diffcache.__all__) == {"dllm", "kv", "quant", "video"}


def test_a_fresh_interpreter_has_the_packages_and_imports_nothing_heavy() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import diffcache
new = set(sys.modules) - before
tops = {name.partition(".")[0] for name in new} - sys.stdlib_module_names
assert tops <= {"diffcache", "safetensors", "torch", "numpy"}, tops
assert len(new) < 120  # whatever the machine: seconds would tell of its other work
assert not {"diffcache.kv", "diffcache.quant", "numpy.testing"} & set(sys.modules)
assert diffcache.kv.__name__ == "diffcache.kv" and diffcache.quant.__name__ == "diffcache.quant"
diffcache.video.Window, diffcache.dllm.DKVCache, diffcache.kv.snapkv(8) | diffcache.kv.kivi()
import diffcache.kv.life.lmcache, diffcache.eval.kv.command
dir(diffcache.kv), diffcache.kv.recipe_names()
assert not {"diffusers", "transformers", "lmcache"} & set(sys.modules)
from diffcache import *
assert wrap is diffcache.wrap and report is diffcache.report
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", [*WORDS, "reuse", "kernel"])
def test_every_row_has_its_class_or_function_under_its_name(kind: Any) -> None:
    for name, row in rows_of(kind).items():
        made = row.load()
        if kind == "kernel":
            assert getattr(made, "name", made) == name
            continue
        assert getattr(made, "name", made.__name__) == name
        assert row.sentence.endswith(".")


@pytest.mark.parametrize("kind", ["method", "dllm", "video", "recipe", "reuse"])
def test_a_row_has_the_paper_that_is_cited(kind: Any) -> None:
    for row in rows_of(kind).values():
        said = " ".join((row.load().__doc__ or "").split())
        if kind in ("recipe", "reuse"):
            assert f"Reference: {row.paper or 'none'}" in said, row.name
        else:
            numbers = re.findall(r"\d{4}\.\d{5}", row.paper)
            assert all(number in said + row.load().bibtex for number in numbers), row.name


@pytest.fixture(scope="module")
def model() -> Any:
    return llama().double()


def left(model: Any) -> Any:
    """Everything a cache could leave behind."""
    parts = {
        path: (type(part), sorted(part.__dict__), list(part._forward_hooks)) for path, part in model.named_modules()
    }
    return parts, model.config._attn_implementation, dict(vars(model))


def test_a_model_with_a_recipe_caches_every_call_until_it_is_unwrapped(model: Any) -> None:
    before, stock = left(model), model.generate(**ONE, **GREEDY)
    expected = model.generate(**ONE, past_key_values=kv.cache_for(model, "snapkv", **SNAP), **GREEDY)
    kv.detach(model)
    assert not torch.equal(expected.sequences, stock.sequences), "dropping slots must show"
    for ask in (
        lambda: diffcache.wrap(model, "snapkv", **SNAP),
        lambda: diffcache.wrap(model, "snapkv:budget=12,window=4"),
        lambda: diffcache.wrap(model, kv.snapkv(**SNAP)),
        lambda: diffcache.wrap(model, [kv.snapkv(**SNAP)] * 4),
    ):
        assert ask() is model
        same(model.generate(**ONE, **GREEDY), expected)
        assert diffcache.unwrap(model) is model
        assert left(model) == before
    same(model.generate(**ONE, **GREEDY), stock)
    with diffcache.wrapped(model, "snapkv:budget=12,window=4|kivi:bits=8,group=8") as used:
        model.generate(**ONE, **GREEDY)
        assert used.count == 1 and used.cache.store.layers[0].held < 24
        assert diffcache.cite(model).count("@misc") == 2
        diffcache.reset(model)
        assert used.cache is None
    assert left(model) == before


def test_a_copy_of_a_wrapped_model_is_stock(model: Any) -> None:
    stock, plain = model.generate(**ONE, **GREEDY), type(model)
    diffcache.wrap(model, "snapkv", **SNAP)
    try:
        written = io.BytesIO()
        torch.save(model, written)
        written.seek(0)
        copies = [copy.deepcopy(model), torch.load(written, weights_only=False), copy.copy(model)]
        for other in copies:
            assert type(other) is plain
            kv.detach(other)
            same(other.generate(**ONE, **GREEDY), stock)
    finally:
        diffcache.unwrap(model)


def test_of_two_that_wrap_one_is_refused_and_a_call_under_way_is_not_cut(model: Any) -> None:
    before, errors = left(model), []
    start = threading.Barrier(4)

    def wrap() -> None:
        start.wait()
        try:
            diffcache.wrap(model, "snapkv", **SNAP)
        except AttachError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wrap) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(errors) == 3 and all("already runs under Recipe 'snapkv'" in e for e in errors)
    with pytest.raises(AttachError, match="already runs under"):
        diffcache.wrap(model, "elastic")

    def unwrap(*_: Any) -> None:
        with pytest.raises(AttachError, match="a call of this model is under way"):
            diffcache.unwrap(model)

    with model.lm_head.register_forward_hook(unwrap):
        model.generate(**ONE, **GREEDY)
        model(**ONE)
    fails = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**ONE)
    fails.remove()
    diffcache.unwrap(model)
    assert left(model) == before


def film(session: Any, chunks: int = 3) -> torch.Tensor:
    return torch.cat([session.next() for _ in range(chunks)], 2)


def test_a_video_with_a_policy_gives_it_to_new_streams() -> None:
    with CausalVideo(wan(layers=1)) as video:
        before = dict(vars(video))
        expected = film(video.session(text(), size=SIZE, policy=Window(3, 0)))
        full = film(video.session(text(), size=SIZE))
        opened = video.session(text(), size=SIZE)
        assert diffcache.wrap(video, "window", window=3, sinks=0) is video
        session = video.session(text(), size=SIZE)
        assert session.policy == video.policy == Window(3, 0) and opened.policy == FullHistory()
        assert torch.equal(film(session), expected) and torch.equal(film(opened), full)
        assert torch.equal(film(video.session(text(), size=SIZE, policy="full")), full)
        with pytest.raises(AttachError, match="already runs under Window.*unwrap it first"):
            diffcache.wrap(video, "deep-forcing")
        assert diffcache.unwrap(video) is video and dict(vars(video)) == before
        assert session.policy == Window(3, 0)
        assert torch.equal(film(video.session(text(), size=SIZE)), full)
        with pytest.raises(AttachError, match="CausalVideo is not wrapped"):
            diffcache.unwrap(video)


def test_a_video_takes_a_method_and_a_policy_side_by_side() -> None:
    with CausalVideo(wan(layers=2)) as video:
        before, plain = dict(vars(video)), sorted(vars(video.transformer))
        diffcache.wrap(video, "deep-forcing:window=9,sinks=3,budget=8,recent=4")
        diffcache.wrap(video, "interval", every=2)
        film(video.session(text(), size=SIZE), 1)
        assert diffcache.report(video).skipped > 0
        assert "2512.05081" in diffcache.cite(video)
        diffcache.unwrap(video)
        assert dict(vars(video)) == before and sorted(vars(video.transformer)) == plain
        diffcache.wrap(video, "interval", every=2)
        diffcache.unwrap(video)
        assert sorted(vars(video.transformer)) == plain


def test_policies_by_name() -> None:
    assert make_policy("deep_forcing", window=9, budget=8, sinks=3) == DeepForcing(9, 3, 8)
    assert make_policy("window:window=4,sinks=1") == Window(4, 1)
    assert make_policy("quantized:policy='window:window=9',bits=2").policy == Window(9)


def test_what_decodes_is_wrapped_in_the_place_of_its_model() -> None:
    network = bidirectional(torch.float32)
    before = sorted(vars(network))
    lm = DiffusionLM(network, mask_id=MASK)
    with diffcache.wrapped(network, DKVCache(every=4)):
        expected = lm.generate([1, 2, 3], Schedule(8, 4)).ids
    assert diffcache.wrap(lm, "dkv-cache", every=4) is lm and lm.policy == DKVCache(every=4)
    answer = lm.generate([1, 2, 3], Schedule(8, 4))
    assert torch.equal(answer.ids, expected) and diffcache.report(lm).skipped > 0
    assert diffcache.unwrap(lm) is lm and lm.policy is None
    assert sorted(vars(network)) == before
