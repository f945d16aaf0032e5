"""Answer OpenAI-style requests for completions with a diffusion language model.

One thread decodes all requests together (continuous batching); a handler waits for its own.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from diffcache.dllm.decode import Schedule
from diffcache.dllm.sampler import Sampler
from diffcache.method import check_int
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.pipelines.prompt_tokens import tokens_of

STOPS = "the server stops"
BODY = 2**20  # most bytes of a request
LOOK = 0.2  # seconds between two looks at whether a client has gone
# Fields of a request that may have no other value than this one.
FIXED: dict[str, Any] = dict.fromkeys(("logprobs", "stop", "suffix", "logit_bias", "stream_options"))
FIXED |= {"n": 1, "best_of": 1, "echo": False, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
TAKEN = {"model", "prompt", "max_tokens", "stream", "temperature", "user"}
_log = logging.getLogger("diffcache.serve")


@dataclass(eq=False)
class Completion:
    """One answer on its way, to one prompt of a request.

    Attributes:
        prompt: Text or tokens of the prompt; its tokens once it is decoded.
        most: Tokens that are asked for.
        loop: Loop of the handler.
        events: Events for the handler: a piece of text with the reason why the answer ended, None where it goes on; or
            the error that ended it.
        tokens: Tokens of the answer so far.
        text: Text of these tokens, as far as the handler was told; the whole text once it has ended.
        is_over: Whether nobody waits for it any more.
    """

    prompt: Any
    most: int
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    is_over: bool = False

    def tell(self, event: Any) -> None:
        """Hand an event to the handler; called by the decoding thread."""
        with suppress(RuntimeError):  # its loop has ended
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Events(StreamingResponse):
    """A stream of events; its prompts leave when it ends, also where it never began."""

    wanted: Sequence[Completion] = ()

    async def __call__(self, *given: Any) -> None:
        """Send the stream."""
        try:
            await super().__call__(*given)
        finally:
            leave(self.wanted)


class Completions:
    """Completions by one model, whose attention is causal over blocks, wrapped with a cache.

    `complete` is a handler of Starlette and FastAPI, also within a deployment of Ray Serve. A request that is refused,
    fails or goes away disturbs no other. Requests may have `prompt` (text, tokens, or a list of either), `max_tokens`,
    `stream` and `temperature`; other fields that would change the answer are refused.

    Args:
        lm: The model with its tokenizer, as `DiffusionLM.serve` takes it.
        schedule: Schedule of the answers, whose length is the most of `max_tokens`; its `eos_id` ends them early.
        sampler: Sampler of all requests.
        name: Name of the model in requests and answers.
        slots: Prompts that are decoded at a time.
        longest: Most tokens of a prompt.
        waiting: Prompts that may wait for a place; requests beyond are told to come again.

    Raises:
        ValueError: If a setting is out of its range or does not fit the model, there is no tokenizer, or the model
            cannot decode prompts that come and go.
    """

    def __init__(
        self,
        lm: DiffusionLM,
        schedule: Schedule,
        sampler: Sampler | None = None,
        *,
        name: str = "diffusion-lm",
        slots: int = 8,
        longest: int = 1024,
        waiting: int = 64,
    ) -> None:
        check_int("waiting", waiting, 1)
        if lm.tokenizer is None:
            raise ValueError("lm: has no tokenizer; give DiffusionLM(model, tokenizer) the model's")
        self.lm, self.schedule, self.name = lm, schedule, name
        self.sampler = Sampler() if sampler is None else sampler
        self.slots, self.longest, self.waiting = slots, longest, waiting
        list(lm.serve([], schedule, sampler, slots=slots, longest=longest))  # raises if it cannot
        self.by_token = copy.copy(lm)
        self.by_token.tokenizer = None  # answers come as tokens, which are counted
        self.queue: deque[Completion] = deque()
        self.running: dict[int, Completion] = {}
        self.change = threading.Condition()
        self.is_closed = False
        self.thread = threading.Thread(target=self._decode, daemon=True, name="completions")
        self.thread.start()

    def close(self) -> None:
        """Stop decoding; answers under way end with an error."""
        with self.change:
            self.is_closed = True
            self.change.notify_all()
        self.thread.join()

    # the decoding thread -----------------------------------------------------------------------

    def _decode(self) -> None:
        """Decode prompts as they come, until the server is closed."""
        while True:
            with self.change:
                self.change.wait_for(lambda: self.queue or self.is_closed)
                if self.is_closed:
                    break
            try:
                self._decode_some()
            except Exception as error:  # the model failed: answers under way are told so, later ones are served
                self._end(self.running.values(), RuntimeError(f"{type(error).__name__}: {error}"))
                self.running.clear()
        with self.change:
            self._end([*self.running.values(), *self.queue], StoppedError(STOPS))
            self.queue.clear()
        self.running.clear()

    def _end(self, wanted: Iterable[Completion], why: RuntimeError) -> None:
        for one in wanted:
            one.tell(why)  # never the model's ValueError, which would be a 400

    def _decode_some(self) -> None:
        """Decode until nobody asks any more."""
        calls: dict[str, Any] = {"on_settled": self._settled, "is_canceled": self._is_canceled}
        asked = (self._prompts(), self.schedule, self.sampler)
        with closing(self.by_token.serve(*asked, slots=self.slots, longest=self.longest, **calls)) as answers:
            for number, ids in answers:
                one = self.running.pop(number)
                if isinstance(ids, ValueError):
                    one.tell(ids)
                elif not one.is_over:
                    one.tokens = ids
                    self._show(one, ends=True)

    def _prompts(self) -> Iterator[Any]:
        """Yield the prompt of the next request, None where there is none."""
        number = 0
        while not self.is_closed:
            with self.change:
                one = self.queue.popleft() if self.queue else None
            if one is None:
                yield None
                continue
            if one.is_over:
                continue
            try:
                size = self.lm.masked.size("vocab_size")
                (one.prompt,) = tokens_of([one.prompt], self.lm.tokenizer, size)
            except Exception as error:  # a tokenizer may raise anything
                one.tell(error)
                continue
            self.running[number] = one
            number += 1
            yield one.prompt

    def _settled(self, number: int, tokens: Any) -> None:
        one = self.running[number]
        one.tokens += tokens
        if not one.is_over:
            self._show(one)

    def _is_canceled(self, number: int) -> bool:
        is_over = self.running[number].is_over or self.is_closed
        if is_over and not self.is_closed:
            del self.running[number]
        return is_over

    def _show(self, one: Completion, ends: bool = False) -> None:
        """Send a handler the text that settled and, where the answer is over, the reason."""
        kept, eos = one.tokens[: one.most], self.schedule.eos_id
        stops = eos in kept
        if stops:
            kept = kept[: kept.index(eos)]  # type: ignore[arg-type]
        text = self.lm.text(kept)
        if ends or stops or len(kept) == one.most:
            piece = text[len(one.text) :]
            one.text, one.tokens, one.is_over = text, kept, True
            one.tell((piece, "stop" if stops else "length"))
        elif text.startswith(one.text) and text != one.text and not text.endswith("\ufffd"):
            one.tell((text[len(one.text) :], None))  # no half a character
            one.text = text

    # a request ---------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """Answer with the list of models, as `GET /v1/models` asks for it."""
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    async def complete(self, request: Request) -> Response:
        """Answer a request for completions, at once or as a stream of events."""
        try:
            asked = await self._asked(request)
            wanted = self._wanted(asked)
        except ClientDisconnect:
            return Response(status_code=499)
        except HTTPException as error:
            return refusal(error.detail, error.status_code)
        except ValueError as error:
            return refusal(str(error), 400)
        with self.change:
            self.queue = deque(one for one in self.queue if not one.is_over)
            if self.is_closed:
                return refusal(STOPS, 503)
            if len(self.queue) + len(wanted) > self.waiting:
                return refusal("too many requests wait; come again in a second", 429)
            self.queue += wanted
            self.change.notify_all()
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        if asked.get("stream"):
            events = Events(self._stream(head, wanted), media_type="text/event-stream")
            events.wanted = wanted
            return events
        answers = asyncio.create_task(ended(wanted))
        try:
            while not (await asyncio.wait([answers], timeout=LOOK))[0]:
                if await request.is_disconnected():
                    return Response(status_code=499)
            choices = [
                {"index": n, "text": one.text, "finish_reason": why, "logprobs": None}
                for n, (one, why) in enumerate(zip(wanted, answers.result(), strict=True))
            ]
        except Exception as error:
            return refusal(*fault(error))
        finally:
            answers.cancel()
            leave(wanted)
        spent, made = sum(len(one.prompt) for one in wanted), sum(len(one.tokens) for one in wanted)
        usage = {"prompt_tokens": spent, "completion_tokens": made, "total_tokens": spent + made}
        return JSONResponse({**head, "choices": choices, "usage": usage})

    async def _stream(self, head: dict[str, Any], wanted: list[Completion]) -> AsyncIterator[str]:
        """Yield the events of a stream, one prompt after the other."""
        for n, one in enumerate(wanted):
            try:
                async for text, why in pieces(one):
                    choice = {"index": n, "text": text, "finish_reason": why, "logprobs": None}
                    yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
            except Exception as error:  # the status is sent already
                yield f"data: {json.dumps(_error(*fault(error)))}\n\n"
                return
        yield "data: [DONE]\n\n"

    async def _asked(self, request: Request) -> dict[str, Any]:
        """Return the fields of a request.

        Raises:
            ClientDisconnect: If the client goes before all of it came.
            HTTPException: If it is too large, or asks for another model.
            ValueError: If it cannot be read, or asks for something that is not offered.
        """
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > BODY:
                raise HTTPException(413, f"the request has more than {BODY} bytes; shorten it")
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict) or "prompt" not in asked:
            raise ValueError("the request must be a JSON object with a prompt")
        if asked.get("model", self.name) != self.name:
            raise HTTPException(404, f"model={asked['model']!r:.99}: there is {self.name!r}")
        fixed = {**FIXED, "temperature": self.sampler.temperature}
        for key, value in asked.items():
            if key not in fixed and key not in TAKEN:
                raise ValueError(f"{key}: is no field that is taken; leave it out")
            if key in fixed and value is not None and value != fixed[key]:
                raise ValueError(f"{key}={value!r:.99}: must be {fixed[key]!r} here; leave it out")
        if not isinstance(asked.get("stream", False), (bool, type(None))):
            raise ValueError(f"stream={asked['stream']!r}: must be true or false")
        return asked

    def _wanted(self, asked: dict[str, Any]) -> list[Completion]:
        """Return the prompts of a request.

        Raises ValueError if there are none, or the answer is longer than the schedule's.
        """
        prompts = asked["prompt"]
        is_one = isinstance(prompts, str) or (isinstance(prompts, list) and _is_row(prompts))
        prompts = [prompts] if is_one else prompts
        kinds = isinstance(prompts, list) and all(isinstance(p, str) or _is_row(p) for p in prompts)
        if not kinds or not 1 <= len(prompts) <= self.waiting:
            raise ValueError(f"prompt: must be a text, its tokens, or a list of 1 to {self.waiting} of either")
        most = asked.get("max_tokens")
        most = self.schedule.length if most is None else most
        check_int("max_tokens", most, 1)
        if most > self.schedule.length:
            raise ValueError(f"max_tokens={most}: answers have at most {self.schedule.length} tokens")
        loop = asyncio.get_running_loop()
        return [Completion(prompt, most, loop) for prompt in prompts]


async def pieces(one: Completion) -> AsyncIterator[tuple[str, str | None]]:
    """Yield the text of an answer as it settles; the last piece comes with the reason why it ended.

    Raises the error that ended it, if any.
    """
    why = None
    while why is None:
        event = await one.events.get()
        if isinstance(event, Exception):
            raise event
        text, why = event
        yield text, why


async def ended(wanted: list[Completion]) -> list[str | None]:
    """Wait for the whole texts of answers, and return the reason why each ended.

    Raises the error that ended one, if any.
    """
    reasons = []
    for one in wanted:
        told = [why async for _, why in pieces(one)]
        reasons.append(told[-1])
    return reasons


def leave(wanted: Sequence[Completion]) -> None:
    """Give up the places of prompts that have not ended."""
    for one in wanted:
        one.is_over = True


class StoppedError(RuntimeError):
    """The server stops while an answer is under way."""


def refusal(message: str, status: int) -> Response:
    """Return the answer to a request that is not served."""
    return JSONResponse(_error(message, status), status, {"Retry-After": "1"} if status == 429 else None)


def fault(error: Exception) -> tuple[str, int]:
    """Return the text that a client is told about an error, and the status: 4xx for the client's fault, else 5xx.

    The text of a model's error stays here: it may contain names of files of this machine.
    """
    if isinstance(error, ValueError):
        return str(error), 400
    if isinstance(error, StoppedError):
        return STOPS, 503
    _log.error("an answer broke off", exc_info=error)
    return "the answer broke off; the log of the server says more", 500


def _error(message: str, status: int) -> dict[str, Any]:
    message = message.encode(errors="replace").decode()  # half characters are no UTF-8
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _is_row(prompt: Any) -> bool:
    """Return whether a prompt is a list of tokens."""
    return bool(prompt) and isinstance(prompt, list) and all(type(x) is int for x in prompt)
