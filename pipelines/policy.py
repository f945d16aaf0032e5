"""A diffusion policy: a chunk of a robot's next actions is drawn by denoising.

Diffusion Policy, arXiv 2303.04137: from the last observations a chunk of actions is drawn, its
start is executed, and the next chunk is drawn from what is observed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from diffusers import DDPMScheduler, DiffusionPipeline, SchedulerMixin
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from diffcache.pipelines.policy_transformer import TransformerForDiffusion


@dataclass
class PolicyOutput(BaseOutput):  # type: ignore[misc]
    """Return value of a policy.

    Attributes:
        actions: The actions to execute, `[B, n_action_steps, A]`.
        chunk: The whole chunk, `[B, horizon, A]`.
    """

    actions: Tensor
    chunk: Tensor


class DiffusionPolicyPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Draws the next actions from observations.

    Args:
        transformer: The denoiser.
        scheduler: DDPM, or any scheduler of diffusers that steps one timestep at a time.
        n_action_steps: Actions to execute of each chunk.
        observation: `[scale, offset]`, lists of one number or one a dimension: the denoiser sees
            `observation * scale + offset`; None changes nothing.
        action: The same for actions: the denoiser draws `action * scale + offset`.

    Examples:
        >>> pipe = DiffusionPolicyPipeline.from_pretrained(DIRECTORY)  # doctest: +SKIP
        >>> actions = pipe(observation, num_inference_steps=100).actions  # doctest: +SKIP
    """

    model_cpu_offload_seq = "transformer"

    def __init__(
        self,
        transformer: TransformerForDiffusion,
        scheduler: SchedulerMixin,
        n_action_steps: int = 8,
        observation: list[list[float]] | None = None,
        action: list[list[float]] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.register_to_config(
            n_action_steps=n_action_steps, observation=observation or [[1.0], [0.0]], action=action or [[1.0], [0.0]]
        )

    @torch.no_grad()
    def __call__(
        self,
        observation: Tensor,
        num_inference_steps: int = 100,
        generator: torch.Generator | list[torch.Generator] | None = None,
        *,
        return_dict: bool = True,
    ) -> Any:
        """Draw the next actions.

        Args:
            observation: The last observations, oldest first, `[B, n_obs_steps, D]` or `[n_obs_steps, D]`, float.
            num_inference_steps: Denoising steps, 1 to the scheduler's training steps.
            generator: Generator of the noise: one, or one a sample.
            return_dict: Whether to return a `PolicyOutput` or its two tensors.

        Returns:
            The actions to execute and the whole chunk.

        Raises:
            ValueError: If the observation has another shape than the policy was trained with.
        """
        config, device = self.transformer.config, self._execution_device
        seen = config.horizon if config.n_obs_steps is None else config.n_obs_steps
        observation = observation if observation.ndim == 3 else observation[None]
        if observation.ndim != 3 or observation.shape[1:] != (seen, config.cond_dim):
            raise ValueError(
                f"observation of shape {tuple(observation.shape)}: must be [B, {seen}, {config.cond_dim}]"
            )
        dtype = self.transformer.dtype
        scale, offset = (torch.tensor(part, device=device) for part in self.config.observation)
        cond = (observation.to(device) * scale + offset).to(dtype)
        shape = (len(cond), config.horizon, config.input_dim)
        sample = randn_tensor(shape, generator=generator, device=device, dtype=dtype)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            given = self.scheduler.scale_model_input(sample, timestep)
            out = self.transformer(given, timestep, cond)
            sample = self.scheduler.step(out, timestep, sample, generator=generator)[0]
        self.maybe_free_model_hooks()
        scale, offset = (torch.tensor(part, device=device) for part in self.config.action)
        chunk = (sample.float() - offset) / scale
        first = seen - 1  # a chunk starts at the oldest observation, so this is the action after the newest one
        actions = chunk[:, first : first + self.config.n_action_steps]
        return PolicyOutput(actions, chunk) if return_dict else (actions, chunk)


class Environment(Protocol):
    """Episodes that run side by side."""

    @property
    def running(self) -> Tensor:
        """Mask of the episodes that are not over, bool `[E]`."""

    def observe(self) -> Tensor:
        """Return the last observations of every episode, `[E, n_obs_steps, D]`."""

    def act(self, actions: Tensor) -> None:
        """Execute `[E, n, A]`, one action after the other; episodes that are over ignore them."""


def rollout(
    pipe: DiffusionPolicyPipeline, environment: Environment, *, num_inference_steps: int = 100, seed: int = 0
) -> int:
    """Run every episode to its end with a receding horizon: draw a chunk, execute its start.

    Only episodes that are not over are drawn for, each with noise of its own, so that an episode does not depend on
    the others of its batch. The environment holds the outcome afterwards.

    Returns:
        Number of chunks that were drawn one after the other.
    """
    count = len(environment.running)
    noises = [torch.Generator().manual_seed(seed * 1_000_003 + number) for number in range(count)]
    chunks = 0
    while bool(environment.running.any()):
        chosen = environment.running.nonzero().flatten()
        own = [noises[number] for number in chosen.tolist()]
        out = pipe(environment.observe()[chosen], num_inference_steps, own)
        actions = out.actions.cpu()
        every = torch.zeros(count, *actions.shape[1:])
        every[chosen] = actions
        environment.act(every)
        chunks += 1
    return chunks


def load_policy(state: Mapping[str, Tensor], n_head: int, n_action_steps: int = 8) -> Any:
    """Build a pipeline from the weights of a published transformer policy.

    Args:
        state: `state_dicts["ema_model"]` (or `["model"]`) of a checkpoint of the Diffusion Policy
            repository with a low-dimensional transformer policy: `model.*` and `normalizer.*`.
        n_head: Attention heads, which the weights do not tell.
        n_action_steps: Actions to execute of each chunk.

    Returns:
        A `DiffusionPolicyPipeline` with the repository's scheduler: DDPM, 100 steps.

    Raises:
        ValueError: If the weights are not those of a decoder that sees observations.
    """
    weights = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    if not {"cond_obs_emb.weight", "decoder.layers.0.linear1.weight"} <= set(weights):
        raise ValueError(
            "state: must hold model.cond_obs_emb and model.decoder, the policy that is conditioned "
            "on observations and time"
        )
    layers = {
        part: len({k.split(".")[2] for k in weights if k.startswith(f"{part}.layers.")})
        for part in ("encoder", "decoder")
    }
    model = TransformerForDiffusion(
        input_dim=weights["input_emb.weight"].shape[1],
        output_dim=weights["head.weight"].shape[0],
        horizon=weights["pos_emb"].shape[1],
        n_obs_steps=weights["cond_pos_emb"].shape[1] - 1,
        cond_dim=weights["cond_obs_emb.weight"].shape[1],
        n_layer=layers["decoder"],
        n_head=n_head,
        n_emb=weights["pos_emb"].shape[2],
        causal_attn="mask" in weights,
        n_cond_layers=layers["encoder"],
    )
    model.load_state_dict(weights, strict=True)
    norms = [
        [state[f"normalizer.params_dict.{field}.{part}"].tolist() for part in ("scale", "offset")]
        if f"normalizer.params_dict.{field}.scale" in state
        else None
        for field in ("obs", "action")
    ]
    return DiffusionPolicyPipeline(model.eval(), scheduler(), n_action_steps, *norms)


def scheduler(prediction_type: str = "epsilon") -> DDPMScheduler:
    """Return the scheduler of the published policies: DDPM, 100 steps.

    `prediction_type` is what the denoiser predicts: `epsilon` (the noise, as published), `sample` (the actions) or
    `v_prediction`.
    """
    return DDPMScheduler(
        num_train_timesteps=100,
        beta_start=0.0001,
        beta_end=0.02,
        beta_schedule="squaredcos_cap_v2",
        variance_type="fixed_small",
        clip_sample=True,
        prediction_type=prediction_type,
    )
