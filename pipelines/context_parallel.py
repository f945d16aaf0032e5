"""Share a stream of video among processes, which diffusers splits a transformer's tokens over.

Every process calls the same functions with the same arguments. The transformer computes a part of the tokens in each
(Ulysses). Before keys and values are written, the processes exchange them: each gets a part of the heads for all
tokens, so that it holds its heads of the whole history.

>>> transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))  # doctest: +SKIP
>>> session = CausalVideo(transformer).session(text, size=(60, 104))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from diffcache.attach.attention_call import AttentionCall
from diffcache.digest import digest
from diffcache.errors import AttachError
from diffcache.foreign import parallel_config_of, process_group_of
from diffcache.video import VideoPolicy


@dataclass(frozen=True)
class ContextRanks:
    """Processes of a group that share a stream: the rank of this one in it, and their number."""

    group: Any
    rank: int
    count: int

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange a part of the tokens, `[B, T, H, D]`, for a part of the heads of all tokens.

        Returns:
            `[B, T * ranks, H / ranks, D]`.
        """
        parts = x.unflatten(2, (self.count, -1)).movedim(2, 0)
        return self._exchanged(parts).movedim(0, 1).flatten(1, 2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange a part of the heads, `[B, T, H, D]`, for all heads of a part of the tokens.

        Returns:
            `[B, T / ranks, H * ranks, D]`.
        """
        parts = x.unflatten(1, (self.count, -1)).movedim(1, 0)
        return self._exchanged(parts).movedim(0, 2).flatten(2, 3)

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Send each process its part, `[ranks, ...]`, and return the parts that the processes sent to this one."""
        parts = parts.contiguous()
        found = torch.empty_like(parts)
        distributed.all_to_all_single(found, parts, group=self.group)
        return found

    def check_same(self, value: Any, device: torch.device) -> None:
        """Check that all processes were given the same plain data and tensors.

        Raises ValueError in every process if they were not.
        """
        number = int(digest(value), 16) >> 2
        bounds = torch.tensor([number, -number], device=device)
        distributed.all_reduce(bounds, distributed.ReduceOp.MAX, group=self.group)
        if bounds.sum():
            raise ValueError(
                f"rank {self.rank} of {self.count} was given another prompt, switch, seed, policy, "
                "sampler, size, guidance, or other frames than others: processes that share a "
                "stream are given the same"
            )


def ranks_of(model: nn.Module) -> ContextRanks | None:
    """Return the processes that a model's tokens are split over; None where it is not split."""
    group = process_group_of(model)
    if group is None:
        return None
    return ContextRanks(group, distributed.get_rank(group), distributed.get_world_size(group))


def shared_by(model: Any, policy: VideoPolicy, size: tuple[int, int], unit: int) -> ContextRanks | None:
    """Return the processes that share a new stream; None for one process.

    `size` is height and width in latents, `unit` the number of tokens of a frame.

    Raises:
        AttachError: If the model is split in another way than by `ulysses_degree`.
        ValueError: If heads or tokens cannot be split evenly, or the policy compares heads.
    """
    ranks = ranks_of(model)
    if ranks is None:
        return None
    split = parallel_config_of(model).context_parallel_config
    if split is None:
        raise AttachError(
            "TensorParallelConfig: a causal stream is shared by context parallelism alone; give "
            f"enable_parallelism ContextParallelConfig(ulysses_degree={ranks.count})"
        )
    if split.ring_degree > 1 or split.ulysses_anything:
        given = "ulysses_anything=True"
        if split.ring_degree > 1:
            given = f"ring_degree={split.ring_degree}"
        raise AttachError(
            f"{given}: a causal stream is shared by heads, each of which attends to all tokens; "
            f"give ContextParallelConfig(ulysses_degree={ranks.count})"
        )
    heads = model.config.num_attention_heads
    if heads % ranks.count:
        raise ValueError(
            f"ulysses_degree={ranks.count}: {heads} heads cannot be shared out evenly; give a divisor of {heads}"
        )
    if unit % ranks.count:
        raise ValueError(
            f"size={size}: {unit} tokens of a frame cannot be split evenly over {ranks.count} "
            "processes; give a size whose frames can"
        )
    if not policy.by_head:
        raise ValueError(
            f"policy={policy!r}: compares all heads of a layer, of which each of {ranks.count} "
            "processes holds a part; give a policy that goes by the age of frames, such as Window()"
        )
    return ranks


def check_alike(session: Any, *given: Any) -> None:
    """Check that all processes that share a stream are about to do the same.

    `given` are the plain data and tensors of the call: frames, a switch, latents.

    Raises:
        AttachError: If the transformer was split after the stream began.
        ValueError: If processes are given different things.
    """
    transformer = session.video.transformer
    if session.ranks != ranks_of(transformer):
        raise AttachError(
            "enable_parallelism: came after this stream began, which holds all heads; open a new session"
        )
    if session.ranks is not None:
        stream = [session.prompt, session.generator, session.frames]
        settings = [session.policy, session.sampler, session.size, session.guidance]
        session.ranks.check_same([*stream, *settings, *given], transformer.device)


def attend_by_heads(model: nn.Module, call: AttentionCall, attend: Callable[[AttentionCall], Tensor]) -> Tensor:
    """Return the attention of this process's tokens, `[B, T, H, D]`, computed by heads.

    Args:
        model: Transformer, split or not.
        call: Queries, keys and values of this process's tokens.
        attend: Computes the attention of this process's heads over all tokens.
    """
    ranks = ranks_of(model)
    if ranks is None:
        return attend(call)
    q, k, v = ranks.to_heads(torch.cat([call.q, call.k, call.v])).chunk(3)
    return ranks.to_tokens(attend(replace(call, q=q, k=k, v=v)))
