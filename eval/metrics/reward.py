"""Learned human preference of pictures for their prompts: published rewards, or the user's own.

Weights are looked for as `diffcache.eval.metrics.weights` says and never downloaded. ImageReward
(Xu et al., arXiv 2304.05977), HPSv2 (Wu et al., arXiv 2306.09341), GenEval (Ghosh et al., arXiv
2310.11513) and DPG-Bench (Hu et al., arXiv 2403.05135) need packages that do not fit into this
environment, so each runs in an interpreter of its own that is started once and asked batch by
batch. PickScore (Kirstain et al., arXiv 2305.01569) is a CLIP model of transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from diffcache.errors import DiffcacheError, MissingError
from diffcache.eval.metrics import weights
from diffcache.eval.metrics.clip import ClipScore, classes
from diffcache.eval.metrics.pixels import check_pictures
from diffcache.pipelines.load import named_function

OWN = "reward_"  # begins the keys of the user's functions
_TAIL_LINES = 5

# Runs in the other interpreter, which has neither diffcache nor its versions: the first line it
# reads is the setup, every other a batch. Packages print, so answers have a stream of their own.
_LOOP = """
import json, os, sys
import torch
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
setup = json.loads(sys.stdin.readline())
{load}
for line in sys.stdin:
    with torch.no_grad():
        scores = [float(score(prompt, picture)) for picture, prompt in json.loads(line)]
    answers.write(json.dumps(scores) + "\\n")
    answers.flush()
"""
_IMAGE_REWARD = """
import ImageReward
weights, config = setup["weights"]
score = ImageReward.load(weights, device=setup["device"], med_config=config).score
"""
# As in the package's `img_score.score`, which loads the weights anew for every picture; the
# weights that the model is pretrained from would be overwritten, and are not downloaded here.
_HPS = """
from PIL import Image
from hpsv2.src.open_clip import create_model_and_transforms, get_tokenizer
device = setup["device"]
model, _, prepare = create_model_and_transforms(
    "ViT-H-14", device=device, precision="amp", light_augmentation=True, output_dict=True)
stored = torch.load(setup["weights"][0], map_location="cpu", weights_only=True)
model.load_state_dict(stored["state_dict"])
model.eval()
tokenize = get_tokenizer("ViT-H-14")
def score(prompt, picture):
    image = prepare(Image.open(picture)).unsqueeze(0).to(device)
    with torch.autocast(device.split(":")[0], enabled=device != "cpu"):
        found = model(image, tokenize([prompt]).to(device))
        return (found["image_features"] @ found["text_features"].T)[0, 0]
"""


# Runs `scorer` of a file beside this one, which the other interpreter has no package for.
_FILE = """
import importlib.util
spec = importlib.util.spec_from_file_location("scorer", setup["code"])
module = importlib.util.module_from_spec(spec)
sys.modules["scorer"] = module
spec.loader.exec_module(module)
with torch.no_grad():
    score = module.scorer(setup["weights"], setup["device"])
"""


class RewardError(DiffcacheError, RuntimeError):
    """A reward could not be computed."""


class MissingInterpreterError(MissingError):
    """No interpreter is named that has a reward's package."""


class Reward(Protocol):
    """Scores pictures for their prompts."""

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return one score a picture, float [N]; more is better.

        Args:
            pictures: uint8 [N, 3, H, W].
            prompts: N texts.
        """


@dataclass(frozen=True)
class Package:
    """A reward that its own package computes in an interpreter of its own.

    Attributes:
        name: Name of the package's module.
        install: Requirement that pip installs.
        variable: Environment variable that names the interpreter.
        weights: Keys of `diffcache.eval.metrics.weights.WEIGHTS`.
        load: Code that makes `score(prompt, picture)` of `setup`.
        code: File beside this one that `load` runs; "" for none.
    """

    name: str
    install: str
    variable: str
    weights: tuple[str, ...]
    load: str
    code: str = ""

    def interpreter(self) -> Path:
        """Return the interpreter that has the package.

        Raises:
            MissingInterpreterError: If none is named, or there is no such file.
        """
        named = os.environ.get(self.variable)
        if not named:
            raise MissingInterpreterError(
                f"{self.name} needs other versions of its packages and so an environment of its "
                f"own: python -m venv reward && reward/bin/pip install {self.install}, and set "
                f"{self.variable} to its python"
            )
        path = Path(named).expanduser()
        if not path.is_file():
            raise MissingInterpreterError(f"{self.variable}={path}: there is no such interpreter")
        return path


PACKAGES = {
    "image_reward": Package(
        "ImageReward", "image-reward", "DIFFCACHE_REWARD_PYTHON",
        ("image-reward", "image-reward-config"), _IMAGE_REWARD,
    ),
    "hps_v2": Package("hpsv2", "hpsv2", "DIFFCACHE_HPSV2_PYTHON", ("hpsv2",), _HPS),
    "geneval": Package(
        "mmdet", "'mmdet<3' mmcv-full open_clip_torch", "DIFFCACHE_GENEVAL_PYTHON",
        ("geneval-prompts", "geneval-classes", "geneval-detector", "geneval-clip"), _FILE,
        "geneval.py",
    ),
    "dpg_bench": Package(
        "modelscope", "'modelscope[multi-modal]'", "DIFFCACHE_DPG_PYTHON",
        ("dpg-questions", "dpg-mplug"), _FILE, "dpg_bench.py",
    ),
}  # fmt: skip
# Name on the command line -> key of the metric.
NAMES = {
    "imagereward": "image_reward", "hpsv2": "hps_v2", "pickscore": "pick_score",
    "geneval": "geneval", "dpg-bench": "dpg_bench",
}  # fmt: skip


@dataclass
class Elsewhere:
    """A package's reward in another interpreter, which is started at the first call.

    Args:
        package: Package that computes the reward.
        device: Device of its model, as torch names it.

    Raises:
        MissingInterpreterError: If no interpreter has the package.
        MissingWeightsError: If a weight file is not found.
    """

    package: Package
    device: str = "cpu"
    files: tuple[Path, ...] = field(init=False)
    program: Path = field(init=False)

    def __post_init__(self) -> None:
        self.program = self.package.interpreter()
        self.files = tuple(weights.find(name) for name in self.package.weights)

    @cached_property
    def _errors(self) -> IO[str]:
        return tempfile.TemporaryFile("w+")

    @cached_property
    def _process(self) -> subprocess.Popen[str]:
        # Without its tokenizer on the machine a package would try to download it.
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        started = subprocess.Popen(
            [str(self.program), "-c", _LOOP.format(load=self.package.load)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=offline,
        )  # fmt: skip
        setup = {"weights": list(map(str, self.files)), "device": self.device}
        if self.package.code:
            setup["code"] = str(Path(__file__).with_name(self.package.code))
        self._send(started, setup)
        return started

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the reward of each picture, float64 [N].

        Args:
            pictures: uint8 [N, 3, H, W].
            prompts: N texts.

        Raises:
            RewardError: If the interpreter fails, or answers something else than N numbers.
        """
        with tempfile.TemporaryDirectory() as folder:
            pairs = []
            for number, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
                place = f"{folder}/{number}.png"
                Image.fromarray(picture.movedim(0, -1).cpu().numpy()).save(place)
                pairs.append((place, prompt))
            self._send(self._process, pairs)
            stream = self._process.stdout
            line = stream.readline() if stream else ""
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()[-_TAIL_LINES:]
            raise RewardError(
                f"{self.program} ended with code {code} while {self.package.name} ran:\n  "
                + "\n  ".join(said or ["nothing on its error output"])
            )
        try:
            return torch.tensor(json.loads(line), dtype=torch.float64)
        except (ValueError, TypeError) as error:
            raise RewardError(f"{self.program} answered {line[:80]!r}, no numbers") from error

    def _send(self, process: subprocess.Popen[str], message: Any) -> None:
        try:
            if process.stdin:
                process.stdin.write(json.dumps(message) + "\n")
                process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading its answer says why

    def entry(self) -> dict[str, Any]:
        """Return what a record says of the back end."""
        found = {"backend": "real", "extractor": self.package.name}
        return {**found, "sha256": weights.sha256(self.files[0])}


@dataclass
class PickScore:
    """`exp(logit scale) cos(image features, text features)` of PickScore's CLIP model.

    Args:
        device: Device of the model, as torch names it.
        folder: Folder of the model; None to look for it.

    Raises:
        MissingWeightsError: If there is no such folder.
        MissingPackageError: If transformers cannot import its CLIP.
    """

    device: str = "cpu"
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.folder = weights.find("pickscore", self.folder)
        classes()

    @cached_property
    def _scorer(self) -> ClipScore:
        return ClipScore(self.folder, self.device)

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each picture for its own prompt, float64 [N].

        Args:
            pictures: uint8 [N, 3, H, W].
            prompts: N texts.
        """
        scale: Tensor = self._scorer.model.logit_scale.double().exp().cpu()
        return scale * self._scorer.cosines(pictures, prompts)

    def entry(self) -> dict[str, Any]:
        """Return what a record says of the back end."""
        assert self.folder is not None
        name = self.folder.name
        return {"backend": "real", "extractor": name, "sha256": weights.sha256(self.folder)}


@dataclass
class Own:
    """A function of the user's.

    Args:
        named: `module:function`; the module must be importable.

    Raises:
        ValueError: If it is not of that form, or names nothing that can be called.
    """

    named: str

    def __post_init__(self) -> None:
        self.function = named_function("reward", self.named)

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return what the function says, float64 [N].

        Args:
            pictures: uint8 [N, 3, H, W].
            prompts: N texts.
        """
        return torch.as_tensor(self.function(pictures, prompts)).detach().double().cpu()

    def entry(self) -> dict[str, Any]:
        """Return what a record says of the back end, with the title of the metric."""
        return {"backend": "user", "extractor": self.named, "title": self.named}


def load(names: str, device: str = "cpu") -> dict[str, Elsewhere | PickScore | Own]:
    """Return rewards by the key of their metric; what they need is here, models load when asked.

    Args:
        names: Keys of `NAMES` and `module:function`, with commas between them; "" for none.
        device: Device of published rewards, as torch names it.

    Raises:
        ValueError: If a name is none, or is given twice.
        MissingError: If weights, a package or an interpreter are missing.
    """
    found: dict[str, Elsewhere | PickScore | Own] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        module, _, function = name.partition(":")
        if name not in NAMES and not (module and function):
            raise ValueError(f"reward {name}: must be {', '.join(NAMES)} or module:function")
        key = NAMES.get(name) or OWN + function
        if key in found:
            raise ValueError(f"reward {names}: two of them are {key}; give one at a time")
        if key in PACKAGES:
            found[key] = Elsewhere(PACKAGES[key], device)
        else:
            found[key] = PickScore(device) if name in NAMES else Own(name)
    return found


def score(reward: Reward, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the reward of each picture, float64 [N], after checking what came back.

    Args:
        reward: Reward that scores the pictures.
        pictures: uint8 [N, 3, H, W].
        prompts: N texts.

    Raises:
        ValueError: If there are not as many prompts as pictures.
        RewardError: If it did not return one finite number a picture.
    """
    check_pictures(pictures)
    if len(prompts) != len(pictures):
        raise ValueError(f"{len(pictures)} pictures need as many prompts, not {len(prompts)}")
    found = reward(pictures, prompts)
    if found.shape != (len(pictures),):
        raise RewardError(f"the reward returned {list(found.shape)}, not [{len(pictures)}]")
    if not bool(found.isfinite().all()):
        raise RewardError(
            f"the reward of picture {int((~found.isfinite()).nonzero()[0])} is not a finite number"
        )
    return found
