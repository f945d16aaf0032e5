"""Weight files of the real metrics: their names, places and hashes, and a search for them.

Nothing here downloads: a file is found on this machine and its hash is right, or the error says
which file, where it comes from, its hash and every place that was searched. Hashes are those in the
publishers' own file names or addresses, or, where those carry none, the ones that several public
projects pin independently of each other; None where no hash is published.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from diffcache.errors import DiffcacheError, MissingError

VARIABLE = "DIFFCACHE_WEIGHTS"


class MissingWeightsError(MissingError, FileNotFoundError):
    """A weight file is on none of the places where it was looked for."""


class WrongWeightsError(DiffcacheError, ValueError):
    """A weight file is there, but it is another one than the metric is defined with."""


@dataclass(frozen=True)
class WeightFile:
    """A file of weights, or a folder in the format of transformers."""

    name: str  # name that `find` takes
    file: str  # file name (of a folder: its name)
    url: str  # address where people get it by hand
    # Full hash, or the first digits of it as torch-hub file names carry them; None where no hash is published
    sha256: str | None
    used_by: tuple[str, ...]  # keys of the metrics in `diffcache.eval.metrics.definitions.METRICS`
    folder: str = ""  # place inside a tool's own cache, relative to it
    # Cache that is searched besides `$DIFFCACHE_WEIGHTS`: `torch`, `vbench`, or `hub:<owner>/<name>` for the one
    # of Hugging Face
    cache: str = "torch"
    is_folder: bool = False  # whether it is a folder of a model, with the configuration of transformers


_INCEPTION = ("fid", "fid_to_uncached", "kid", "is", "precision", "recall", "density", "coverage")
_GRIT = ("vbench_object_class", "vbench_multiple_objects", "vbench_color", "vbench_spatial_relationship")
_VICLIP = ("vbench_temporal_style", "vbench_overall_consistency")
_FIDELITY = "https://github.com/toshas/torch-fidelity/releases/download/"
_OPENAI = "https://openaipublic.azureedge.net/clip/models/"
_B32 = "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af"
_L14 = "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836"
_USED_MODELS = "https://huggingface.co/OpenGVLab/VBench_Used_Models/resolve/main/"
_CLIP_REPOSITORY = "openai/clip-vit-large-patch14"
_PICK_REPOSITORY = "yuvalkirstain/PickScore_v1"


def _vbench(name: str, place: str, url: str, sha256: str | None, used_by: tuple[str, ...]) -> WeightFile:
    folder, _, file = place.rpartition("/")
    return WeightFile(f"vbench-{name}", file, url, sha256, used_by, folder, "vbench")


# fmt: off
_FILES = (
    WeightFile(
        "inception", "weights-inception-2015-12-05-6726825d.pth",
        f"{_FIDELITY}v0.2.0/weights-inception-2015-12-05-6726825d.pth",
        "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2", _INCEPTION),
    WeightFile(
        "inception-clean", "inception-2015-12-05.pt",
        "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
        "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
        ("fid", "fid_to_uncached", "kid")),
    WeightFile(
        "alexnet", "alexnet-owt-7be5be79.pth",
        "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth",
        "7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02", ("lpips",)),
    WeightFile(
        "clip", "clip-vit-large-patch14", f"https://huggingface.co/{_CLIP_REPOSITORY}", None,
        ("clip_score",), cache=f"hub:{_CLIP_REPOSITORY}", is_folder=True),
    WeightFile(
        "i3d", "i3d_torchscript.pt",
        "https://www.dropbox.com/s/ge9e5ujwgetktms/i3d_torchscript.pt?dl=1",
        "bec6519f66ea534e953026b4ae2c65553c17bf105611c746d904657e5860a5e2", ("fvd",)),
    WeightFile(
        "pickscore", "PickScore_v1", f"https://huggingface.co/{_PICK_REPOSITORY}", None,
        ("pick_score",), cache=f"hub:{_PICK_REPOSITORY}", is_folder=True),
    _vbench(
        "dino", "dino_model/dino_vitbase16_pretrain.pth",
        "https://dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth",
        "bf34ad0f424b9029b593e8dc3ed553bf26e88bcba0d32bf3e62a6209cb64c85e",
        ("vbench_subject_consistency",)),
    _vbench(
        "clip-b32", "clip_model/ViT-B-32.pt", f"{_OPENAI}{_B32}/ViT-B-32.pt", _B32,
        ("vbench_background_consistency", "vbench_appearance_style")),
    _vbench(
        "clip-l14", "clip_model/ViT-L-14.pt", f"{_OPENAI}{_L14}/ViT-L-14.pt", _L14,
        ("vbench_aesthetic_quality",)),
    _vbench(
        "aesthetic", "aesthetic_model/emb_reader/sa_0_4_vit_l_14_linear.pth",
        "https://github.com/LAION-AI/aesthetic-predictor/raw/main/sa_0_4_vit_l_14_linear.pth",
        "2cd4e60f4f24ae3bcd57b847b13c1f3ba27edc28cc1a7f9ce74ee9f421243cba",
        ("vbench_aesthetic_quality",)),
    _vbench(
        "amt", "amt_model/amt-s.pth",
        "https://huggingface.co/lalala125/AMT/resolve/main/amt-s.pth", None,
        ("vbench_motion_smoothness",)),
    _vbench(
        "raft", "raft_model/models/raft-things.pth",
        "https://dl.dropboxusercontent.com/s/4j4z58wuv8o0mfz/models.zip",
        "fcfa4125d6418f4de95d84aec20a3c5f4e205101715a79f193243c186ac9a7e1",
        ("vbench_dynamic_degree",)),
    _vbench(
        "musiq", "pyiqa_model/musiq_spaq_ckpt-358bb6af.pth",
        "https://github.com/chaofengc/IQA-PyTorch/releases/download/v0.1-weights/musiq_spaq_ckpt-358bb6af.pth",
        "358bb6af275e28ea56821d44fb55c6cb83645db11f394d3ad65b2d149965ab50",
        ("vbench_imaging_quality",)),
    _vbench(
        "grit", "grit_model/grit_b_densecap_objectdet.pth",
        f"{_USED_MODELS}grit_b_densecap_objectdet.pth", None, _GRIT),
    _vbench(
        "umt", "umt_model/l16_ptk710_ftk710_ftk400_f16_res224.pth",
        f"{_USED_MODELS}l16_ptk710_ftk710_ftk400_f16_res224.pth", None, ("vbench_human_action",)),
    _vbench(
        "tag2text", "caption_model/tag2text_swin_14m.pth",
        "https://huggingface.co/spaces/xinyu1205/recognize-anything/resolve/main/tag2text_swin_14m.pth",
        None, ("vbench_scene",)),
    _vbench(
        "viclip", "ViCLIP/ViClip-InternVid-10M-FLT.pth",
        f"{_USED_MODELS}ViClip-InternVid-10M-FLT.pth", None, _VICLIP),
    _vbench(
        "viclip-vocabulary", "ViCLIP/bpe_simple_vocab_16e6.txt.gz",
        "https://raw.githubusercontent.com/openai/CLIP/main/clip/bpe_simple_vocab_16e6.txt.gz",
        "924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a", _VICLIP),
)
# fmt: on
WEIGHTS: dict[str, WeightFile] = {weight.name: weight for weight in _FILES}


def find(name: str, path: str | Path | None = None) -> Path:
    """Return where a weight file is, after checking its hash.

    Looks at `path` if given and nowhere else; otherwise in `$DIFFCACHE_WEIGHTS` and then in the cache of the
    library that would have downloaded it. `path` is the file, or a folder with it.

    Raises:
        ValueError: If no weight file has that name.
        MissingWeightsError: If there is no such file in any of the places.
        WrongWeightsError: If the first one found has another hash.
    """
    if name not in WEIGHTS:
        raise ValueError(f"unknown weights {name!r}: must be one of {', '.join(sorted(WEIGHTS))}")
    weight = WEIGHTS[name]
    places = list(candidates(weight, path))
    for place in places:
        if (place / "config.json" if weight.is_folder else place).is_file():
            check(weight, place)
            return place
    what = "folder" if weight.is_folder else "file"
    digest = f"sha256 {weight.sha256}" if weight.sha256 else "no published hash"
    metrics = ", ".join(weight.used_by)
    searched = "".join(f"\n  {place}" for place in places)
    raise MissingWeightsError(
        f"no {what} {weight.file} ({digest}), which {metrics} needs: get it from {weight.url} and "
        f"give its path, or put it into ${VARIABLE}; looked for{searched}"
    )


def candidates(weight: WeightFile, path: str | Path | None = None) -> Iterator[Path]:
    """Yield the places where a file is looked for, best first."""
    if path is not None:
        given = Path(path).expanduser()
        yield given
        if given.is_dir():
            yield given / weight.file
        return
    own = os.environ.get(VARIABLE)
    if own:
        yield Path(own).expanduser() / weight.file
        if weight.folder:
            yield Path(own).expanduser() / weight.folder / weight.file
    yield from _cached(weight)


def check(weight: WeightFile, path: Path) -> None:
    """Compare the hash of a file with the one of its entry, where that has one.

    Raises WrongWeightsError if they differ.
    """
    if weight.sha256 is None:
        return
    found = sha256(path)
    if not found.startswith(weight.sha256):
        raise WrongWeightsError(
            f"{path} is not {weight.file}: its sha256 must be {weight.sha256} and is {found}; get "
            f"the right one from {weight.url}"
        )


def sha256(path: Path) -> str:
    """Return the hash of a file, or of the weight files of a folder, as 64 hex digits.

    Every file is read once per process, unless its size or time changes.
    """
    if path.is_dir():
        parts = sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".bin"))
        digests = "".join(sha256(part) for part in parts)
        return hashlib.sha256(digests.encode()).hexdigest()
    status = path.stat()
    return _sha256(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(path: Path, size: int, modified_ns: int) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _cached(weight: WeightFile) -> Iterator[Path]:
    """Yield the places in the caches of the libraries that use a file."""
    home = Path.home()
    if weight.cache == "vbench":
        root = os.environ.get("VBENCH_CACHE_DIR")
        yield (Path(root) if root else home / ".cache" / "vbench") / weight.folder / weight.file
        return
    if weight.cache.startswith("hub:"):
        yield from _snapshots(weight.cache.removeprefix("hub:"))
        return
    yield Path(torch.hub.get_dir()) / "checkpoints" / weight.file


def _snapshots(repository: str) -> list[Path]:
    """Return the downloaded revisions of a repository, the most recent first."""
    cache = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub = Path(cache) if cache else Path(home) / "hub"
    folder = hub / f"models--{repository.replace('/', '--')}" / "snapshots"
    found = folder.iterdir() if folder.is_dir() else iter(())
    newest = sorted(found, key=lambda place: place.stat().st_mtime, reverse=True)
    return newest or [folder / "*"]
