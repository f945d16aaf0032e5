"""The servers of docs/serving.md, as they stand there, asked by real clients at the same time."""

import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline

import diffcache
from tests.pages.blocks import ROOT, blocks
from tests.pages.stand_ins import small_flux

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed")
PROGRAMS = [block.text for block in blocks("docs/serving.md") if block.language == "python"]
EVERY = (1, 2, None, 6)  # of four requests; None is what the server wraps with
ASK = {"prompt": "a red ring", "steps": 8, "size": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a tiny FLUX and the programs of the page in one file."""
    folder = tmp_path_factory.mktemp("serving")
    small_flux(folder / "model")
    (folder / "server.py").write_text("\n\n".join(PROGRAMS[:1]))
    (folder / "on_ray.py").write_text("from server import *\n\n" + PROGRAMS[1])
    encode, inside = FluxPipeline.encode_prompt, threading.Lock()

    @wraps(encode)
    def encode_few(self: Any, *given: Any, **named: Any) -> Any:
        if named.get("prompt_embeds") is not None:
            return encode(self, *given, **named)
        assert inside.acquire(blocking=False), "two threads use one tokenizer"
        try:
            time.sleep(0.05)  # long enough that another would come in
            return encode(self, *given, **{**named, "max_sequence_length": 24})  # not 512
        finally:
            inside.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("MODEL", str(folder / "model"))
        patch.setattr(FluxPipeline, "encode_prompt", encode_few)
        yield folder
    sys.modules.pop("server", None)


@pytest.fixture(scope="module")
def server(place: Path) -> ModuleType:
    return importlib.import_module("server")


@pytest.fixture
def address(server: ModuleType) -> Iterator[str]:
    """The server on a free port of this machine, in a thread."""
    running = uvicorn.Server(uvicorn.Config(server.app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not running.started and time.monotonic() < until:
        time.sleep(0.02)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/images"
    running.should_exit = True
    thread.join(30)


def asked(every: int | None, seed: int) -> dict[str, Any]:
    return {**ASK, "seed": seed} | ({} if every is None else {"every": every})


def post(address: str, given: dict[str, Any]) -> Any:
    return httpx.post(address, json=given, timeout=240)


def test_requests_at_the_same_time_have_settings_of_their_own(
    server: ModuleType, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {every: server.images.draw(server.Request(**asked(every, 3))).body for every in EVERY}
    assert len(set(alone.values())) == len(EVERY)
    meeting = threading.Barrier(len(EVERY))  # no call ends before all have begun
    prepare = FluxPipeline.prepare_latents

    def prepare_together(self: Any, *given: Any, **named: Any) -> Any:
        meeting.wait(120)
        return prepare(self, *given, **named)

    monkeypatch.setattr(FluxPipeline, "prepare_latents", prepare_together)
    with ThreadPoolExecutor(len(EVERY)) as pool:
        answers = list(pool.map(lambda every: post(address, asked(every, 3)), EVERY))
    for every, answer in zip(EVERY, answers, strict=True):
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "image/png"
        assert answer.content == alone[every], every


def test_one_request_says_nothing_about_the_next(server: ModuleType, address: str) -> None:
    first = post(address, asked(None, 5)).content
    assert post(address, asked(1, 5)).content != first
    assert post(address, asked(None, 5)).content == first
    assert server.images.draw(server.Request(**asked(4, 5))).body == first  # as it was wrapped
    diffcache.unwrap(server.images.pipe)
    plain = server.images.pipe(
        ASK["prompt"], height=16, width=16, num_inference_steps=8, generator=torch.Generator().manual_seed(5)
    ).images[0]
    diffcache.wrap(server.images.pipe, "taylorseer", every=4)
    exact = httpx.post(address, json=asked(1, 5), timeout=240).content
    assert exact == png(plain)


def png(picture: Any) -> bytes:
    import io

    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("every", [0, 21, "often"])
def test_bad_settings_are_the_client_s_fault(address: str, every: Any) -> None:
    answer = post(address, {**ASK, "every": every})
    assert answer.status_code == 422
    assert "every" in answer.text


def test_on_ray(place: Path, server: ModuleType) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[serve]'")
    serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    path = os.pathsep.join([str(place), str(ROOT), *filter(None, sys.path)])
    runtime_env = {"env_vars": {"PYTHONPATH": path, "MODEL": str(place / "model")}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=runtime_env)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8412})
        serve.run(importlib.import_module("on_ray").application)
        with ThreadPoolExecutor(2) as pool:
            found = list(
                pool.map(lambda every: post("http://127.0.0.1:8412/images", asked(every, 3)).content, (1, 6, 1))
            )
        assert found[0] == found[2] != found[1]
    finally:
        serve.shutdown()
        ray.shutdown()
