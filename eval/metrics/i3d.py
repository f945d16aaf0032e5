"""Features of films for FVD: logits of an I3D network trained on Kinetics-400.

The torchscript of StyleGAN-V (Skorokhodov et al., arXiv 2112.14683), called as there: values from 0
to 255, which it rescales and resizes to 224 x 224 itself. The Frechet distance of these logits is
FVD (Unterthiner et al., arXiv 1812.01717), usually of 2,048 against 2,048 clips of 16 frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from diffcache.eval.metrics import weight_files
from diffcache.eval.metrics.pixels import check_pictures

FEWEST_FRAMES = 10  # the network halves time five times and then averages over two
DIMENSIONS = 400


class I3D:
    """The network, ready to be called with films.

    Args:
        path: The torchscript file, None to look in the usual places; nothing is downloaded.
        device: Device of the network.

    Raises:
        MissingWeightsError: If it is not found.
        WrongWeightsError: If it is another one.
    """

    def __init__(self, path: str | Path | None = None, device: str | torch.device = "cpu") -> None:
        file = weight_files.find("i3d", path)
        self.sha256 = weight_files.sha256(file)
        self.device = torch.device(device)
        self.network = torch.jit.load(str(file), map_location=self.device).eval()

    @torch.no_grad()
    def features(self, films: Sequence[Tensor], batch_size: int = 4) -> Tensor:
        """Return the logits of films, float32 [N, 400] on the CPU.

        Args:
            films: N films of one length and size, each uint8 [F, 3, H, W].
            batch_size: Films at once.

        Raises:
            ValueError: If there are none, they differ in shape, or have fewer than 10 frames.
        """
        if not len(films):
            raise ValueError("films: there are none")
        for number, film in enumerate(films):
            check_pictures(film)
            if film.shape != films[0].shape:
                raise ValueError(
                    f"film {number} is {list(film.shape)} and film 0 is {list(films[0].shape)}: "
                    "FVD compares films of one length and size; cut them first"
                )
        if len(films[0]) < FEWEST_FRAMES:
            raise ValueError(f"{len(films[0])} frames: FVD needs films of {FEWEST_FRAMES} or more")
        found = []
        for start in range(0, len(films), batch_size):
            batch = torch.stack(list(films[start : start + batch_size])).to(self.device)
            values = batch.transpose(1, 2).float()
            found.append(self.network(values, rescale=True, resize=True, return_features=True))
        features = torch.cat([part.float().cpu() for part in found])
        if features.shape != (len(films), DIMENSIONS):
            raise ValueError(
                f"the network returned {list(features.shape)}, not [{len(films)}, {DIMENSIONS}]: "
                "it is not the I3D torchscript of StyleGAN-V"
            )
        return features

    def entry(self) -> dict[str, str]:
        """Return the back end's entry in a record."""
        return {"backend": "real", "extractor": "i3d kinetics-400 (StyleGAN-V torchscript)", "sha256": self.sha256}
