"""Learned human preference: any function of the user's, or ImageReward in its own interpreter.

A reward is a function of pictures and prompts named as `module:function`. ImageReward (Xu et al.,
arXiv 2304.05977) needs an old transformers, so its package runs in another interpreter, named by
`$DIFFCACHE_REWARD_PYTHON`, over a folder of pictures; its weights are found here and never
downloaded there.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from diffcache.errors import DiffcacheError
from diffcache.eval import weights
from diffcache.eval.metrics.inception import check_pictures

VARIABLE = "DIFFCACHE_REWARD_PYTHON"

# Runs in the other interpreter, which has neither diffcache nor its versions: argument 1 is the
# request, argument 2 the file for the answer.
DRIVER = """
import json, os, sys
import torch
import ImageReward
with open(sys.argv[1], encoding="utf-8") as stream:
    request = json.load(stream)
model = ImageReward.load(request["weights"], device=request["device"],
                         med_config=request["config"])
scores = []
with torch.no_grad():
    for picture, prompt in request["pairs"]:
        scores.append(float(model.score(prompt, picture)))
with open(sys.argv[2] + ".tmp", "w", encoding="utf-8") as stream:
    json.dump({"scores": scores}, stream)
os.replace(sys.argv[2] + ".tmp", sys.argv[2])
"""


class RewardError(DiffcacheError, RuntimeError):
    """A reward could not be computed."""


class Reward(Protocol):
    """Scores pictures for their prompts."""

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return one score a picture, float [N]; more is better.

        Args:
            pictures: uint8 [N, 3, H, W].
            prompts: N texts.
        """


def load(entry: str) -> Reward:
    """Return the function that an entry names.

    Args:
        entry: `module:function`; the module must be importable.

    Raises:
        ValueError: If it is not of that form, or names nothing that can be called.
    """
    module, colon, name = entry.partition(":")
    if not (module and colon and name):
        raise ValueError(f"reward={entry!r}: must be 'module:function'")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"reward={entry!r}: {module} cannot be imported ({error})") from error
    if not callable(found):
        raise ValueError(f"reward={entry!r}: {module} has no function {name}")
    return cast(Reward, found)


def score(reward: Reward, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the reward of each picture, float64 [N], after checking what the function returned.

    Args:
        reward: The function.
        pictures: uint8 [N, 3, H, W].
        prompts: N texts.

    Raises:
        ValueError: If there are not as many prompts as pictures.
        RewardError: If it did not return one finite number a picture.
    """
    check_pictures(pictures)
    if len(prompts) != len(pictures):
        raise ValueError(f"{len(pictures)} pictures need as many prompts, not {len(prompts)}")
    found = torch.as_tensor(reward(pictures, prompts)).detach().double().cpu()
    if found.shape != (len(pictures),):
        raise RewardError(f"the reward returned {list(found.shape)}, not [{len(pictures)}]")
    if not bool(found.isfinite().all()):
        raise RewardError(f"the reward of picture {int((~found.isfinite()).nonzero()[0])} is "
                          "not a finite number")  # fmt: skip
    return found


def interpreter(python: str | Path | None = None) -> Path:
    """Return the interpreter that has ImageReward.

    Args:
        python: Its path, None for `$DIFFCACHE_REWARD_PYTHON`.

    Raises:
        RewardError: If none is named, or there is no such file.
    """
    named = python or os.environ.get(VARIABLE)
    if not named:
        raise RewardError(
            "ImageReward needs an old transformers and so an environment of its own: python -m "
            f"venv reward && reward/bin/pip install image-reward, and set {VARIABLE} to its python"
        )
    path = Path(named).expanduser()
    if not path.is_file():
        raise RewardError(f"{VARIABLE}={path}: there is no such interpreter")
    return path


def image_reward(
    pictures: Sequence[Path],
    prompts: Sequence[str],
    python: str | Path | None = None,
    folder: str | Path | None = None,
    device: str = "cpu",
) -> Tensor:
    """Return the ImageReward of picture files for their prompts, float64 [N].

    Args:
        pictures: N picture files.
        prompts: N texts.
        python: Interpreter that has the package, None for `$DIFFCACHE_REWARD_PYTHON`.
        folder: With `ImageReward.pt` and `med_config.json`, None to look in the usual places.
        device: Where to run.

    Raises:
        ValueError: If there are no pictures, or not as many prompts.
        FileNotFoundError: If a picture is not there.
        MissingWeightsError: If a weight file is not found.
        RewardError: If the interpreter is not there, or fails, or returns something else.
    """
    if not pictures or len(prompts) != len(pictures):
        raise ValueError(f"{len(pictures)} pictures and {len(prompts)} prompts: must be as many")
    for picture in pictures:
        if not Path(picture).is_file():
            raise FileNotFoundError(f"{picture}: there is no such picture")
    program = interpreter(python)
    request = {
        "weights": str(weights.find("image-reward", folder)),
        "config": str(weights.find("image-reward-config", folder)),
        "device": device,
        "pairs": [[str(Path(p).resolve()), t] for p, t in zip(pictures, prompts, strict=True)],
    }
    return _scores(_ask(program, request), len(pictures))


def _ask(program: Path, request: Mapping[str, Any]) -> Any:
    """Run the driver and return what it wrote."""
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place) / "request.json", Path(place) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [str(program), "-c", DRIVER, str(asked), str(answered)]
        # Without its tokenizer on the machine the package would try to download it.
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode or not answered.is_file():
            lines = done.stderr.strip().splitlines()[-5:] or ["nothing on its error output"]
            raise RewardError(
                f"{program} ended with code {done.returncode} while ImageReward ran:\n  "
                + "\n  ".join(lines)
            )
        try:
            return json.loads(answered.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RewardError(f"{program} wrote something else than JSON: {error}") from error


def _scores(answer: Any, count: int) -> Tensor:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        raise RewardError(f"the interpreter returned {str(answer)[:80]!r}, not {count} scores")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in scores):
        raise RewardError("the interpreter returned a score that is not a finite number")
    return torch.tensor(scores, dtype=torch.float64)
