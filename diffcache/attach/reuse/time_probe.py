"""The time embedding of a denoiser, seen where the model computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.reuse.frame import FRAME, Frame, current_frame
from diffcache.errors import AttachError
from diffcache.features.base import Probe
from diffcache.foreign import take_hooks
from diffcache.step import CURRENT

# Probe -> where models of diffusers have it; of paths that stand together the sum is meant. Only
# modules that see the timestep: a `time_text_embed` as a whole sees the text as well.
PATHS: dict[str, tuple[tuple[str, ...], ...]] = {
    "time": (
        ("condition_embedder.time_embedder",),
        ("time_embedding", "ofs_embedding"),
        ("time_embedding",),
        ("time_text_embed.timestep_embedder",),
        ("t_embedder",),
    ),
    "time-projection": (("condition_embedder.time_proj",),),
}


class TimeWatch:
    """Forward hook of a module that embeds the timestep: notes its output.

    Args:
        path: Path of the module in the model.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        """Keep the output in the frame of the call."""
        call = None if torch.compiler.is_compiling() else CURRENT.get()
        frame: Frame | None = None if call is None else call.storage.get(FRAME)
        if frame is not None and isinstance(out, Tensor):
            frame.times.setdefault(self.path, []).append(out.detach())


class TimePeek:
    """Shows the time embedding of a call, which the model computes before its blocks.

    Args:
        model: The denoiser.
        probe: Probe to show, a key of `PATHS`.

    Raises:
        AttachError: If the model has no module at any of its paths.
    """

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        self._name, self._probe = type(model).__name__, probe
        modules = {path: m for path, m in model.named_modules() if any(True for _ in m.parameters())}
        known = PATHS[probe]
        self.paths = next((paths for paths in known if all(p in modules for p in paths)), ())
        if not self.paths:
            names = ", ".join(" + ".join(paths) for paths in known)
            raise AttachError(
                f"{self._name} has no {probe} embedding where one is looked for ({names}); use input='modulated'"
            )
        for path in self.paths:
            unwatch(modules[path])  # a copy of a watched one
        self._hooks = [modules[path].register_forward_hook(TimeWatch(path)) for path in self.paths]

    def remove(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()

    def look(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the embedding of the call at hand, `[B, D]`; nothing is run for it.

        Raises AttachError if the call did not compute it once before its blocks.
        """
        frame = current_frame()
        times = [frame.times.get(path, []) for path in self.paths]
        # a traced call may run the model again under its frame
        if not all(times) or (frame.trace is None and any(len(outputs) > 1 for outputs in times)):
            raise AttachError(self._refusal(times))
        total = times[0][-1]
        for outputs in times[1:]:
            total = total + outputs[-1]
        return total

    def _refusal(self, times: list[list[Tensor]]) -> str:
        counts = ", ".join(f"{path} {len(outputs)} times" for path, outputs in zip(self.paths, times, strict=True))
        return (
            f"{self._name}: its {self._probe} embedding must be computed once in a call, before "
            f"its blocks; it ran {counts}; use input='modulated'"
        )


def unwatch(module: nn.Module) -> None:
    """Take the hook that notes time embeddings off a module."""
    take_hooks(module, lambda hook: isinstance(hook, TimeWatch))


def time_peek(model: nn.Module, probe: Probe | None) -> TimePeek | None:
    """Return the peek that shows a time embedding, which the model must have; None for other probes."""
    return None if probe is None or probe not in PATHS else TimePeek(model, probe)
