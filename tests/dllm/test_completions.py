"""OpenAI-style completions: real clients that come, stream, cancel, drop and ask for nonsense."""

import asyncio
import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import diffcache
from diffcache.dllm import BlockCache, Dynamic, Sampler, Schedule, Threshold
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.targets import handle_of
from tests.dllm.test_remote import made
from tests.dllm.toys import prompts
from tests.pages.blocks import ROOT, blocks

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")
from diffcache.pipelines.completions import BODY, Completions  # noqa: E402

EOS = 48  # which ends some of the answers early
SCHEDULE, SAMPLER = Schedule(16, None, eos_id=EOS), Sampler(rule=Threshold(0.3))
ROWS = prompts(13, 3, 16, 20, 1, 8, 12, 5)


class Numbers:
    """A tokenizer whose texts are tokens as numbers."""

    eos_token_id = EOS

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **settings: Any) -> str:
        return "".join(f" {token}" for token in ids)


@pytest.fixture(scope="module")
def lm() -> DiffusionLM:
    return DiffusionLM(diffcache.wrap(made("llada2", num_hidden_layers=2), BlockCache()), Numbers())


@pytest.fixture(scope="module")
def served(lm: DiffusionLM) -> Iterator[tuple[Completions, str]]:
    """The server on a free port of this machine, in a thread."""
    completions = Completions(lm, SCHEDULE, SAMPLER, slots=3, longest=24, waiting=20)
    app = fastapi.FastAPI()
    app.add_api_route("/v1/completions", completions.complete, methods=["POST"])
    app.add_api_route("/v1/models", completions.models)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until = time.monotonic() + 120
    while not running.started and time.monotonic() < until:
        time.sleep(0.02)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield completions, f"http://127.0.0.1:{port}/v1"
    running.should_exit = True
    thread.join(30)
    completions.close()
    assert not completions.thread.is_alive()


def text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def alone(lm: DiffusionLM, row: list[int], most: int = 16) -> tuple[str, str, int]:
    """Return the text of a prompt by itself, why it ends, and its tokens."""
    ids = lm.generate([row], SCHEDULE, SAMPLER).ids[0].tolist()[:most]
    ends = EOS in ids
    ids = ids[: ids.index(EOS)] if ends else ids
    return lm.text(ids), "stop" if ends else "length", len(ids)


def ask(address: str, **asked: Any) -> Any:
    return httpx.post(f"{address}/completions", json=asked, timeout=300)


def streamed(address: str, **asked: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{address}/completions", json={**asked, "stream": True}, timeout=300) as answer:
        rows = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert rows.pop() == "[DONE]"
    return [json.loads(row)["choices"][0] for row in rows]


def idle(completions: Completions) -> None:
    """Wait until nothing is decoded and nobody waits."""
    until = time.monotonic() + 120
    while completions.queue or completions.running or handle_of(completions.lm.model).held_bytes():
        assert time.monotonic() < until, (completions.queue, completions.running)
        time.sleep(0.05)


def test_requests_at_the_same_time_are_answered_as_alone(lm: DiffusionLM, served: tuple[Completions, str]) -> None:
    completions, address = served
    wanted = [alone(lm, row) for row in ROWS]
    assert len({count for *_, count in wanted}) > 1
    with ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(lambda row: ask(address, prompt=text(row)).json(), ROWS))
        parts = list(pool.map(lambda row: streamed(address, prompt=row), ROWS))
    for row, one, pieces, (said, why, count) in zip(ROWS, whole, parts, wanted, strict=True):
        assert [one["choices"][0][key] for key in ("text", "finish_reason")] == [said, why]
        used = [one["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion", "total")]
        assert used == [len(row), count, len(row) + count] and len(one["usage"]) == 3
        assert "".join(piece["text"] for piece in pieces) == said
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [why]
    assert max(map(len, parts)) > 1  # text comes as it settles
    short = ask(address, prompt=[ROWS[0], text(ROWS[1])], max_tokens=3, model="diffusion-lm").json()
    assert [(c["text"], c["finish_reason"]) for c in short["choices"]] == [alone(lm, row, 3)[:2] for row in ROWS[:2]]
    assert httpx.get(f"{address}/models").json()["data"][0]["id"] == "diffusion-lm"
    idle(completions)


def test_the_client_of_openai_is_served(lm: DiffusionLM, served: tuple[Completions, str]) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    client = openai.OpenAI(base_url=served[1], api_key="none", max_retries=0)
    asked = {"model": "diffusion-lm", "prompt": text(ROWS[2]), "max_tokens": 9}
    said, why, count = alone(lm, ROWS[2], 9)
    one = client.completions.create(**asked)
    assert (one.choices[0].text, one.choices[0].finish_reason) == (said, why)
    assert one.usage.completion_tokens == count
    parts = [part.choices[0].text for part in client.completions.create(**asked, stream=True)]
    assert "".join(parts) == said
    with pytest.raises(openai.BadRequestError, match="max_tokens=99: answers have at most 16"):
        client.completions.create(**{**asked, "max_tokens": 99})


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"prompt": ""}, 400, "empty text"),
        ({"prompt": [63]}, 400, "holds the mask"),
        ({"prompt": [99]}, 400, "hold 99, which is no token"),
        ({"prompt": "a b"}, 400, "invalid literal"),  # of the tokenizer
        ({"prompt": [1] * 25}, 400, "has 25 tokens where longest=24"),
        ({"prompt": []}, 400, "prompt: must be a text"),
        ({"prompt": {"a": 1}}, 400, "prompt: must be a text"),
        ({}, 400, "JSON object with a prompt"),
        ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens=0: must be a whole number"),
        ({"prompt": [1], "n": 2}, 400, "n=2: must be 1 here"),
        ({"prompt": [1], "temperature": 0.5}, 400, "temperature=0.5: must be 0.0 here"),
        ({"prompt": [1], "seed": 3}, 400, "seed: is no field that is taken"),
        ({"prompt": [1], "stream": "yes"}, 400, "stream='yes': must be true or false"),
        ({"prompt": [1], "model": "gpt"}, 404, "model='gpt': there is 'diffusion-lm'"),
        ({"prompt": "1 " * BODY}, 413, "more than 1048576 bytes"),
        ({"prompt": [[1]] * 21}, 400, "a list of 1 to 20 of either"),
    ],
)
def test_what_is_not_served_is_said(served: tuple[Completions, str], asked: dict[str, Any], status: int, said: str):
    answer = ask(served[1], **asked)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_a_forward_that_fails_ends_those_under_way_alone(
    lm: DiffusionLM, served: tuple[Completions, str], monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    completions, address = served
    own, calls = lm.masked.logits, []

    def logits(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the device is lost")  # of a model: not the request's fault
        return own(*given)

    monkeypatch.setattr(lm.masked, "logits", logits)
    broken = ask(address, prompt=ROWS[0])
    assert broken.status_code == 500 and "broke off" in broken.json()["error"]["message"]
    assert "device is lost" in logged[-1] and "device is lost" not in broken.text
    assert ask(address, prompt=ROWS[0]).json()["choices"][0]["text"] == alone(lm, ROWS[0])[0]
    idle(completions)


def test_clients_that_cancel_and_drop_leave_nothing(lm: DiffusionLM, served: tuple[Completions, str]):
    """A third reads a piece and closes, a third drops its connection, the others are answered."""
    completions, address = served
    before = threading.active_count()
    port = int(address.split(":")[2].split("/")[0])
    wanted = [alone(lm, row)[0] for row in ROWS]

    def come(number: int) -> bool:
        row = ROWS[number % len(ROWS)]
        asked = {"prompt": row, "stream": number % 3 == 0 or number % 2 == 0}
        if number % 3 == 0:
            with httpx.stream("POST", f"{address}/completions", json=asked, timeout=300) as answer:
                return next(answer.iter_lines(), "") is not None
        if number % 3 == 1:
            body = json.dumps(asked).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", port), 60) as line:
                line.sendall(head.encode() + body[: None if number % 2 else -1])
            return True
        while (answer := ask(address, prompt=row)).status_code == 429:
            time.sleep(0.05)
        return bool(answer.json()["choices"][0]["text"] == wanted[number % len(ROWS)])

    with ThreadPoolExecutor(25) as pool:
        assert all(pool.map(come, range(48)))
    idle(completions)
    assert threading.active_count() <= before + 2
    assert ask(address, prompt=ROWS[0]).json()["choices"][0]["text"] == wanted[0]


class Idle(Completions):
    """Never gets to a request."""

    def _decode(self) -> None:
        pass


def test_more_than_may_wait_are_told_to_come_again(lm: DiffusionLM) -> None:
    completions = Idle(lm, SCHEDULE, SAMPLER, waiting=3)
    app = fastapi.FastAPI()
    app.add_api_route("/", completions.complete, methods=["POST"])

    async def come() -> list[int]:
        found = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as one:
            early = asyncio.create_task(one.post("/", json={"prompt": [[1], [2], [3]]}))
            while not completions.queue:
                await asyncio.sleep(0.01)
            found.append((await one.post("/", json={"prompt": [4]})).status_code)
            early.cancel()
            await asyncio.wait([early])
            late = asyncio.create_task(one.post("/", json={"prompt": [4]}))  # places are free again
            while completions.queue[0].prompt != [4]:
                await asyncio.sleep(0.01)
            late.cancel()
            completions.close()
            found.append((await one.post("/", json={"prompt": [4]})).status_code)
        return found

    assert asyncio.run(come()) == [429, 503]
    with pytest.raises(ValueError, match="lm: has no tokenizer"):
        Completions(DiffusionLM(lm.model), SCHEDULE)
    with pytest.raises(ValueError, match="block=5: must divide"):
        Completions(lm, Schedule(15, 5))


def test_who_is_answered_when_the_server_stops_is_told_so(lm: DiffusionLM, monkeypatch: pytest.MonkeyPatch) -> None:
    completions, app, own = Completions(lm, SCHEDULE, SAMPLER), fastapi.FastAPI(), lm.masked.logits
    app.add_api_route("/", completions.complete, methods=["POST"])

    def logits(*given: Any) -> Any:
        completions.is_closed = True  # as `close` does, which waits for this thread
        return own(*given)

    async def come() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as one:
            return await one.post("/", json={"prompt": ROWS[0]})

    monkeypatch.setattr(lm.masked, "logits", logits)
    told = asyncio.run(come())
    assert told.status_code == 503 and told.json()["error"]["message"] == "the server stops"
    completions.close()


def test_a_deployment_of_ray_serve_answers(tmp_path: Path, lm: DiffusionLM) -> None:
    """The program of docs/serving.md with a tiny model, asked over http."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[serve]'")
    serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    program = [block.text for block in blocks("docs/serving.md") if block.language == "python"][2]
    loads = 'DiffusionLM.from_pretrained("inclusionAI/LLaDA2.0-mini", trust_remote_code=True)'
    assert loads in program
    program = program.replace(loads, 'DiffusionLM(made("llada2"), Numbers())')
    program = program.replace("Schedule(512, ", "Schedule(16, ")
    ours = "from tests.dllm.test_completions import Numbers, made\n"
    (tmp_path / "text_on_ray.py").write_text(ours + program)
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, sys.path)])
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            serve.start(http_options={"host": "127.0.0.1", "port": 8413})
            serve.run(importlib.import_module("text_on_ray").application)
        address, sampler = "http://127.0.0.1:8413/v1", Sampler(rule=Dynamic(0.9))
        for row in ROWS[:3]:
            said = lm.text(lm.generate([row], SCHEDULE, sampler).ids[0].tolist())
            assert ask(address, prompt=row, model="llada2").json()["choices"][0]["text"] == said
            assert "".join(part["text"] for part in streamed(address, prompt=row)) == said
        assert ask(address, prompt=[63]).status_code == 400
    finally:
        serve.shutdown()
        ray.shutdown()
