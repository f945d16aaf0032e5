"""Pipelines that make videos in chunks or segments, or of one packed sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.zoo.pipe import (
    PipeCase,
    assemble,
    common,
    denoiser,
    prompt,
)
from tests.zoo.pipes_video import image_encoder, picture, unipc, wan_vae


class Words:
    """Stands for a chat model's tokenizer: every character is a token."""

    eos_token_id = 1

    def convert_tokens_to_ids(self, token: str) -> int:
        """Return the id of the only special token that is asked for."""
        return 2

    def apply_chat_template(self, messages: Any, **_: Any) -> Any:
        """Return the ids of the texts."""
        text = "".join(str(message["content"]) for message in messages)
        ids = [3 + ord(letter) % 29 for letter in text][-6:]
        return SimpleNamespace(input_ids=ids)


def _far(seed: int) -> Any:
    from diffusers import FlowMapEulerDiscreteScheduler

    model = denoiser("AnyFlowFARTransformer3DModel", seed)
    return assemble("AnyFlowFARPipeline", FlowMapEulerDiscreteScheduler(), transformer=model)


def _far_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 64),
        **prompt(seed, negative=True),
        "num_frames": 13,
        "guidance_scale": 4.0,
        "chunk_partition": [2, 2],
    }


def _animate(seed: int) -> Any:
    encoder, processor = image_encoder(seed)
    return assemble(
        "WanAnimatePipeline",
        unipc(),
        transformer=denoiser("WanAnimateTransformer3DModel", seed),
        vae=wan_vae(seed),
        image_encoder=encoder,
        image_processor=processor,
    )


def _animate_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 32),
        **prompt(seed, negative=True),
        "image": picture(seed),
        "pose_video": [picture(seed + n) for n in range(9)],
        "face_video": [picture(seed + 20 + n) for n in range(9)],
        "segment_frame_length": 5,
        "guidance_scale": 4.0,
    }


def _cosmos3(seed: int) -> Any:
    return assemble(
        "Cosmos3OmniPipeline",
        unipc(),
        transformer=denoiser("Cosmos3OmniTransformer", seed),
        text_tokenizer=Words(),
        vae=wan_vae(seed),
        enable_safety_checker=False,
    )


def _cosmos3_call(pipe: Any, seed: int, steps: int) -> dict[str, Any]:
    return {
        **common(seed, steps, 32),
        "prompt": f"a ring {seed}",
        "num_frames": 5,
        "guidance_scale": 4.0,
    }


PIPES = [
    PipeCase(
        "AnyFlowFARPipeline",
        _far,
        _far_call,
        batched=2,
        note="chunk after chunk, each with a run of its own; a call after each writes a KV cache",
    ),
    PipeCase(
        "WanAnimatePipeline",
        _animate,
        _animate_call,
        branches=2,
        note="segment after segment, each with a run of its own",
    ),
    PipeCase(
        "Cosmos3OmniPipeline",
        _cosmos3,
        _cosmos3_call,
        branches=2,
        batched=0,
        note="one packed sequence of text and video; the text's stream never changes",
    ),
]
