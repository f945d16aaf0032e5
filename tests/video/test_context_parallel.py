"""Two processes that share a stream make the frames of one, each with its heads of the history."""

import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import ContextParallelConfig
from torch import Tensor, distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import diffcache
from diffcache import FirstBlock, Interval
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.pipelines.stream_batch import StreamBatch
from diffcache.video import (
    Cut,
    DeepForcing,
    EMASink,
    FewSteps,
    FullHistory,
    HistoryRetrieval,
    Quantized,
    Recache,
    RollingSink,
    StreamDiffusionV2,
    Window,
)
from tests.video.toys import CHANNELS, CHUNK, SIZE, rollout, text, wan

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs gloo"
)
SAMPLER = FewSteps((1000, 500))
POLICIES = {
    "full": FullHistory(),
    "average": EMASink(3, 1, 0.9),
    "coded": Quantized(Window(6, 3), group=16),
    "rolling sink": RollingSink(6),
}
GUIDED = {"negative": text(1, 9), "guidance": 2.0, "seed": 7}


def streamed(video: CausalVideo, folder: Path) -> dict[str, Any]:
    """Return films of several policies and settings, and the bytes that each stream holds."""
    found: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        session, made, _ = rollout(video, 4, policy=policy, **GUIDED)
        found[name] = torch.cat(made, 2), session.store.nbytes
    session = video.session(text(), size=SIZE, policy=Window(3, 1), seed=3)
    start = torch.randn(1, CHANNELS, 4, *SIZE, generator=torch.Generator().manual_seed(5))
    session.take(start)
    session.switch(text(1, 4), Recache(4))
    made = [session.next()]
    session.switch(text(1, 6), Cut(5))
    made.append(session.next(2))
    session.save(folder)
    restored = video.restore(folder, Window(3, 1))
    found["switched"] = torch.cat([*made, restored.next()], 2), session.store.nbytes
    batch = StreamBatch(video, text(), size=SIZE, policy=Window(3, 1))
    parts = [part for part in [batch.next(), batch.next(), *batch.finish()] if part is not None]
    found["batch"] = torch.cat(parts, 2), batch.levels[0].store.nbytes
    return found


def split(model: Any, ring: int = 1, ulysses: int = 1, **settings: Any) -> None:
    """Have diffusers split a model's tokens; on a CPU it divides by the number of accelerators."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(ring, ulysses, mesh=mesh, **settings)
    with patch.object(torch.accelerator, "device_count", return_value=1):
        model.enable_parallelism(config=config)


def refusals(video: CausalVideo, before: Session, rank: int, folder: Path) -> dict[str, str]:
    """Return what is said of everything that cannot be shared."""
    found: dict[str, str] = {}

    def told(name: str, work: Any) -> None:
        try:
            work()
            found[name] = "nothing"
        except Exception as error:
            found[name] = str(error)

    told("late", before.next)
    by_all_heads = DeepForcing(9, 3, 8, 4), StreamDiffusionV2(), HistoryRetrieval()
    for policy in (*by_all_heads, Quantized(DeepForcing())):
        told(type(policy).__name__, lambda p=policy: video.session(text(), size=SIZE, policy=p))
    told("size", lambda: video.session(text(), size=(2, 6)))
    apart = video.session(text(), size=SIZE, seed=rank)
    told("seed", apart.next)
    switched = video.session(text(), size=SIZE)
    if rank:
        switched.switch(text(1, 4))
    told("switch", switched.next)
    stepped = video.session(text(), size=SIZE)
    if rank:
        stepped.sampler = FewSteps((1000,))
    told("sampler", stepped.next)
    told("rank", lambda: video.restore(folder.parent / str(1 - rank), Window(3, 1)))
    other = CausalVideo(wan(layers=1, heads=3))
    split(other.transformer, ulysses=2)
    told("heads", lambda: other.session(text(), size=SIZE))
    degrees: dict[str, Any] = {"ring": {"ring": 2}, "anything": {"ulysses": 2, "ulysses_anything": True}}
    for name, settings in degrees.items():
        split(model := wan(layers=1), **settings)
        told(name, lambda m=model: CausalVideo(m).session(text(), size=SIZE))
    model = wan(layers=2)
    split(model, ulysses=2)
    for method in (Interval(), FirstBlock()):
        with diffcache.wrapped(model, method), torch.no_grad():
            told(type(method).__name__, lambda: model(*inputs(), return_dict=False))
    return found


def both(_: int, folder: str) -> None:
    """Run two processes, which share what this one imported."""
    torch.set_num_threads(1)
    multiprocessing.start_processes(share, (folder,), 2, start_method="fork")


def share(rank: int, folder: str) -> None:
    """Run one of two processes; what it found lies in the folder."""
    place = Path(folder)
    init_method = f"file://{place / 'meet'}"
    distributed.init_process_group(
        "gloo", rank=rank, world_size=2, init_method=init_method, timeout=timedelta(seconds=60)
    )
    try:
        model = wan(layers=2)
        with CausalVideo(model, sampler=SAMPLER) as video:
            before = video.session(text(), size=SIZE)
            before.next()
            split(model, ulysses=2)
            found = streamed(video, place / str(rank))
            distributed.barrier()
            found["refusals"] = refusals(video, before, rank, place / str(rank))
            with torch.no_grad():
                found["outside"] = model(*inputs(), return_dict=False)[0]
        torch.save(found, place / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy latents, a time and a prompt."""
    x = torch.randn(1, CHANNELS, CHUNK, *SIZE, generator=torch.Generator().manual_seed(1))
    return x, torch.tensor([500.0]), text()


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """Films, bytes and refusals of two processes."""
    paths = [str(Path(__file__).parents[2]), *sys.path]  # the processes import this file as tests.*
    with tempfile.TemporaryDirectory() as folder, patch.object(sys, "path", paths):
        multiprocessing.spawn(both, (folder,), 1)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """Films and bytes of one process."""
    with tempfile.TemporaryDirectory() as folder:
        model = wan(layers=2)
        with CausalVideo(model, sampler=SAMPLER) as video:
            found = streamed(video, Path(folder))
        with torch.no_grad():
            found["outside"] = model(*inputs(), return_dict=False)[0]
        return found


@pytest.mark.parametrize("name", [*POLICIES, "switched", "batch"])
def test_two_processes_make_the_frames_of_one_and_hold_half_each(
    name: str, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    film, held = one[name]
    for each in two:
        assert torch.equal(each[name][0], film)
        assert each[name][1] <= 0.55 * held


def test_a_split_model_is_its_own_outside_of_a_stream(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for each in two:
        torch.testing.assert_close(each["outside"], one["outside"])


REFUSALS = {
    "late": "enable_parallelism: came after this stream began",
    "DeepForcing": "policy=DeepForcing(",
    "StreamDiffusionV2": "policy=StreamDiffusionV2(",
    "HistoryRetrieval": "policy=HistoryRetrieval(",
    "Quantized": "policy=Quantized(",
    "size": "size=(2, 6): 3 tokens of a frame cannot be split evenly over 2",
    "seed": "was given another prompt, switch, seed",
    "switch": "was given another prompt, switch, seed",
    "sampler": "seed, policy, sampler, size",
    "rank": " of 2, here is rank=",
    "heads": "ulysses_degree=2: 3 heads cannot be shared out evenly",
    "ring": "ring_degree=2: a causal stream is shared by heads",
    "Interval": "splits tokens as blocks of blocks are called",
    "FirstBlock": "splits tokens as blocks of blocks are called",
    "anything": "ulysses_anything=True: a causal stream is shared by heads",
}


def test_what_cannot_be_shared_is_refused_in_every_process(two: list[dict[str, Any]]) -> None:
    for each in two:
        assert set(each["refusals"]) == set(REFUSALS)
        for name, words in REFUSALS.items():
            assert words in each["refusals"][name], name
