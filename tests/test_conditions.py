"""Tables of other guidance, size or scheduler are told apart from those that fit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache import CacheWarning, MagCache, TablesError, TemporalTable
from diffcache.attach.fingerprint import facts_of
from diffcache.attach.provenance import effective, other_guidance, other_shape, tables_of
from diffcache.features.each import Each
from diffcache.features.tables import Tables
from tests.zoo.pipes import pipes

STEPS = 6
CASE = pipes()["FluxPipeline"]


def fitted(pipe: Any, **header: Any) -> MagCache:
    """Return a method whose tables are of this pipeline."""
    about = facts_of(pipe.transformer, pipe.scheduler)
    tables = Tables(
        {"method": "magcache", "steps": STEPS, **about, **header}, {"ratios": torch.linspace(1, 0.9, STEPS)}
    )
    return MagCache(threshold=1.0, longest=2, retention=0.0, tables=tables)


def remarks(pipe: Any, method: Any, **call: Any) -> list[str]:
    with diffcache.wrapped(pipe, method), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe(**{**CASE.call(pipe, 0, STEPS), **call})
    return [str(w.message) for w in caught if w.category is CacheWarning]


@pytest.fixture
def pipe() -> Any:
    return CASE.build(0)


def shape_of(pipe: Any) -> list[int]:
    seen: list[Tensor] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    CASE.run(pipe, 0, 1)
    hook.remove()
    return list(seen[0].shape[1:])


def test_a_run_like_the_calibration_says_nothing(pipe: Any) -> None:
    given = CASE.call(pipe, 0, STEPS)
    guidance = {"guidance_scale": given.get("guidance_scale", 3.5), "true_cfg_scale": 1}
    assert remarks(pipe, fitted(pipe)) == []
    assert remarks(pipe, fitted(pipe, guidance=guidance, shape=shape_of(pipe))) == []


@pytest.mark.parametrize(
    "wrap", [lambda m: m, TemporalTable, lambda m: Each((("transformer", m),))], ids=["itself", "inside", "of each"]
)
def test_other_guidance_is_told_once_a_run(pipe: Any, wrap: Any) -> None:
    method = wrap(fitted(pipe, guidance={"guidance_scale": 2.0, "true_cfg_scale": 1.0}))
    (text,) = remarks(pipe, method, guidance_scale=9.0)
    assert "guidance_scale=2.0, this run has guidance_scale=9.0" in text
    assert "calibrate again: diffcache.calibrate(" in text
    assert remarks(pipe, method, guidance_scale=2) == []


def test_guidance_that_is_a_default_counts(pipe: Any) -> None:
    (text,) = remarks(pipe, fitted(pipe, guidance={"true_cfg_scale": 4.0}))
    assert "true_cfg_scale=4.0, this run has true_cfg_scale=1.0" in text


def test_another_size_is_told_once_a_run(pipe: Any) -> None:
    tokens, channels = shape_of(pipe)
    method = fitted(pipe, shape=[tokens, channels])
    (text,) = remarks(pipe, method, height=96, width=32)
    assert f"of shape [{tokens}, {channels}], this run has [" in text
    bare = pipe.transformer
    method, match = fitted(pipe, shape=[1, channels]), rf"\[1, {channels}\], this run has"
    with diffcache.wrapped(bare, method), pytest.warns(CacheWarning, match=match):
        CASE.run(pipe, 0, 2)  # no pipeline is needed


def test_what_is_compared() -> None:
    made = Tables({"method": "magcache", "guidance": {"a": None, "b": [1, 2], "c": 3}}, {})
    assert list(other_guidance([made], {"a": None, "b": (1.0, 2.0)})) == []
    assert len(list(other_guidance([made], {"a": 1.0, "b": [1, 3], "c": 4, "d": 5}))) == 3
    assert list(other_guidance([Tables({}, {})], {"a": 1})) == []
    assert list(other_shape([Tables({}, {})], [4])) == []

    def call(self: Any, one: int, two: int = 2, **more: Any) -> None: ...

    import inspect

    found = effective(inspect.signature(call), (None, 1), {"three": 3})
    assert found == {"self": None, "one": 1, "two": 2, "more": {"three": 3}}
    assert effective(inspect.signature(call), (), {}) == {}
    assert tables_of(diffcache.Interval(every=3)) == []


def test_a_scheduler_replaced_after_wrapping_is_checked(pipe: Any) -> None:
    method, own = fitted(pipe), pipe.scheduler
    ran: list[int] = []
    with torch.no_grad(), diffcache.wrapped(pipe, method):
        expected = CASE.run(pipe, 0, STEPS)
        pipe.scheduler = type(own).from_config(own.config, shift=7.0)
        hook = pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(0))
        for _ in range(2):  # asking again does not help
            with pytest.raises(TablesError, match="with scheduler_config={'shift': .*'shift': 7.0"):
                CASE.run(pipe, 0, STEPS)
        assert not ran
        hook.remove()
        pipe.scheduler = own
        assert torch.equal(CASE.run(pipe, 0, STEPS), expected)
        pipe.scheduler = type(own).from_config(own.config)
        assert torch.equal(CASE.run(pipe, 0, STEPS), expected)
