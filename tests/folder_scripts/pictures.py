"""Folders of pictures, and calls of the scripts on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffcache.eval.workshop.small import stickers


def drawn(count: int, seed: int) -> Tensor:
    made = [stickers.render(scene) for scene in stickers.draw_scenes(count, seed)]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).contiguous()


def saved(folder: Path, pictures: Tensor, ending: str = "png") -> Path:
    folder.mkdir(parents=True)
    for index, picture in enumerate(pictures):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / f"{index}.{ending}")
    return folder


def report(capsys: pytest.CaptureFixture[str], main: Any, *arguments: str) -> dict[str, Any]:
    """Run with `--json -`; nothing but JSON may be on standard output."""
    assert main([*arguments, "--json", "-"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def error(capsys: pytest.CaptureFixture[str], code: int, main: Any, *arguments: str) -> str:
    """Run what must fail with a code and one line on standard error behind warnings; return it."""
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    assert out == "" and lines[-1].startswith("error: "), err
    assert all(line.startswith("warning: ") for line in lines[:-1]), err
    return lines[-1]
