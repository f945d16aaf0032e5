"""Callers of attention to what a store holds: with kernels on they do what plain PyTorch does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kernels import dispatch
from diffcache.kv.attend import Query
from diffcache.kv.recipe import Recipe
from diffcache.kv.reuse.hydragen import hydragen
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import InfinityRoPE, Quantized, VideoPolicy, Window
from tests.video.toys import ONE, rollout, wan


@pytest.fixture(name="both")
def _both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], list[tuple[str, Any]]]:
    """Return a function that calls another with kernels and without, and compares.

    It returns the operators that were launched and their arguments.
    """

    def compare(run: Callable[[], Tensor]) -> list[tuple[str, Any]]:
        made: list[tuple[str, Any]] = []
        plain = dispatch.Operator.launch
        with monkeypatch.context() as within, torch.no_grad():
            within.setattr(dispatch.Operator, "launch", lambda own, *a: made.append((own.name, a)) or plain(own, *a))
            found = run()
            within.setenv("DIFFCACHE_KERNELS", "torch")
            count = len(made)
            wanted = run()
            assert len(made) == count
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
        return [each for each in made if each[0] == "attn_forward"]

    return compare


@pytest.mark.parametrize("policy", [InfinityRoPE(3, 1), Quantized(Window(5, 1), 4, 1, 16)])
def test_a_film_reads_its_history_in_codes_and_before_rotation(policy: VideoPolicy, both: Any) -> None:
    with CausalVideo(wan(layers=1, heads=1), chunk=2, sampler=ONE) as video:
        made = both(lambda: torch.cat(rollout(video, 2, policy=policy)[1], 2))
    assert made and all(args[5] is not None for _, args in made)  # cosines and sines of keys
    assert any(args[2] is not None for _, args in made) is isinstance(policy, Quantized)


def test_a_prefix_that_rows_share_is_attended_to_apart_and_merged(both: Any) -> None:
    fixed = torch.Generator().manual_seed(0)
    prefix, suffix = (torch.randn(2, 1, 2, 20, 16, generator=fixed), torch.randn(2, 3, 2, 4, 16, generator=fixed))
    q = torch.randn(3, 4, 4, 16, generator=fixed)

    def read() -> Tensor:
        store = KVStore(1, Recipe())
        store.begin(20)
        store.layers[0].write(*prefix)
        store.attend(0, Query(q[:1, :, :1], 19, 0.25))
        store.end(True)
        hydragen(store)
        store.begin(4)
        store.layers[0].write(*suffix)
        return store.attend(0, Query(q, 20, 0.25))

    made = both(read)
    shapes = [(list(args[0].shape), list(args[1].shape)) for _, args in made]
    assert sorted(shapes) == [([1, 4, 12, 16], [1, 2, 20, 16]), ([3, 4, 4, 16], [3, 2, 4, 16])]
