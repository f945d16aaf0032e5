"""CLIP score: how well pictures fit their prompts, with a CLIP model in a local folder.

100 max(0, cos(image features, text features)), averaged over samples (Hessel et al., arXiv 2104.08718, with
torchmetrics' factor of 100 in place of the paper's 2.5). The cosine is taken without the model's learned scale.
Prompts longer than the text model are cut at its length, 77 tokens for the published ones. Pictures are prepared by
Pillow whatever else is installed, so that a torchvision on the machine does not change the number.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.eval.metrics import weight_files
from diffcache.eval.metrics.inception import MissingPackageError
from diffcache.eval.metrics.pixels import check_pictures


class ClipScore:
    """A CLIP model that scores pictures.

    Args:
        folder: Folder in the format of transformers: model, tokenizer and image processor; None to look for
            openai/clip-vit-large-patch14 in the usual places. Nothing is downloaded.
        device: Device of the model.

    Raises:
        MissingWeightsError: If there is no such folder.
        MissingPackageError: If transformers cannot import its CLIP, as beside a broken torchvision.
        ValueError: If the folder does not hold a CLIP model.
    """

    def __init__(self, folder: str | Path | None = None, device: str | torch.device = "cpu") -> None:
        self.folder = weight_files.find("clip", folder)
        self.device = torch.device(device)
        model, processor, tokenizer = classes()
        try:
            self.model = model.from_pretrained(self.folder, local_files_only=True)
            self.processor = processor.from_pretrained(self.folder, local_files_only=True)
            self.tokenizer = tokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.folder}: not a folder with a CLIP model ({error})") from error
        self.model = self.model.float().eval().requires_grad_(False).to(self.device)
        self.longest = int(self.model.config.text_config.max_position_embeddings)

    @torch.no_grad()
    def __call__(self, pictures: Tensor, prompts: Sequence[str], batch_size: int = 32) -> Tensor:
        """Return the score of each picture for its own prompt, float64 [N], from 0 to 100.

        Args and errors: `cosines`.
        """
        return 100 * self.cosines(pictures, prompts, batch_size).clamp(min=0)

    @torch.no_grad()
    def cosines(self, pictures: Tensor, prompts: Sequence[str], batch_size: int = 32) -> Tensor:
        """Return the cosine of each picture's features with its own prompt's, float64 [N].

        Args:
            pictures: uint8 [N, 3, H, W].
            prompts: N texts.
            batch_size: Pictures at once.

        Raises:
            ValueError: If there are not as many prompts as pictures.
        """
        check_pictures(pictures)
        if len(prompts) != len(pictures):
            raise ValueError(f"{len(pictures)} pictures need as many prompts, not {len(prompts)}")
        self._warn_of_long(prompts)
        found = []
        for start in range(0, len(pictures), batch_size):
            chosen = slice(start, start + batch_size)
            image = self.image_features(pictures[chosen])
            text = self.text_features(prompts[chosen])
            found.append(functional.cosine_similarity(image, text, dim=1))
        return torch.cat(found)

    def image_features(self, pictures: Tensor) -> Tensor:
        """Return features of pictures, float64 [N, D] on the CPU.

        Args:
            pictures: uint8 [N, 3, H, W].
        """
        arrays = [picture.permute(1, 2, 0).cpu().numpy() for picture in pictures]
        pixels = self.processor(arrays, return_tensors="pt", input_data_format="channels_last")
        found = self.model.get_image_features(pixels["pixel_values"].to(self.device)).pooler_output
        features: Tensor = found.double().cpu()
        return features

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Return features of texts, float64 [N, D] on the CPU."""
        tokens = self.tokenizer(
            list(prompts), padding=True, truncation=True, max_length=self.longest, return_tensors="pt"
        ).to(self.device)
        chosen = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        features: Tensor = self.model.get_text_features(**chosen).pooler_output.double().cpu()
        return features

    def entry(self) -> dict[str, str]:
        """Return the back end's entry in a record."""
        return {
            "backend": "real",
            "extractor": self.folder.name,
            "sha256": weight_files.sha256(self.folder),
            "convention": "100 max(0, cos)",
        }

    def _warn_of_long(self, prompts: Sequence[str]) -> None:
        with_length = self.tokenizer(list(prompts), return_length=True, verbose=False)
        count = sum(int(length) > self.longest for length in with_length["length"])
        if count:
            warnings.warn(
                f"{count} of {len(prompts)} prompts have more than {self.longest} tokens and are "
                "cut for the CLIP score",
                stacklevel=4,
            )


def classes() -> tuple[Any, Any, Any]:
    """Import the model, the Pillow image processor and the tokenizer of transformers' CLIP.

    Raises MissingPackageError if transformers cannot, as beside a broken torchvision.
    """
    try:
        from transformers import AutoTokenizer, CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise MissingPackageError(
            f"transformers cannot import its CLIP ({type(error).__name__}: {reason}); a "
            "torchvision that does not fit torch does this: pip uninstall torchvision"
        ) from error
    return CLIPModel, CLIPImageProcessorPil, AutoTokenizer
