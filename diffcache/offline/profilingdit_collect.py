"""Profile which blocks attend to the foreground."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffcache.features.collect import Collector, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.parts.when import Every
from diffcache.features.profilingdit import OVERLAP, ProfilingDiT
from diffcache.step import Site, Step

QUERIES = 4096  # most queries of a call, evenly spaced, whose attention is looked at
SOME = 512  # image tokens by which the place of text is found
CHUNK = 2**24  # numbers of an attention map that are held at a time
_BLOCK = re.compile(r"(.+?)\.(\d+)(?:\.|$)")
_ENDS = ("first", "last")


class ProfileCollector(Collector):
    """Measures how much of the foreground each block attends to.

    ProfilingDiT, arXiv 2504.03140, section 3: a token is attended to where the attention it receives, averaged over
    queries and heads, is above the mean of the image tokens; a block's overlap is the part of the foreground's tokens
    that are attended to, averaged over frames, steps and prompts. The paper segments the foreground with SAM2 in the
    noise prediction projected to three principal components; here the tokens whose projection has more energy than
    Otsu's threshold are the foreground, or those the caller names. The paper says neither which axis of the attention
    is averaged nor its threshold: both are choices of ours. Masks of padded text are not known here, so that padding
    counts as keys.

    The text tokens of joint attention are left out. Their number follows from the output, whose tokens are the
    image's. At which end they are follows from the sample: in the first block of each list, image tokens that are
    alike in the sample have keys that are alike. So it follows, too, whether frames or channels are the second axis of
    a film.
    """

    wants_attention: ClassVar[bool] = True
    one_shape: ClassVar[bool] = False

    def __init__(self, method: ProfilingDiT) -> None:
        self.sampled, self.text, self.foreground = method.sampled, method.text, method.foreground
        self.overlaps: dict[str, Tensor] = {}  # block -> sums with text first, last; their number
        self.likeness: dict[str, Tensor] = {}  # list -> of keys and sample, text first and last
        self.layout = torch.zeros(2, dtype=torch.float64)  # likeness with frames third, second
        self._received: dict[str, Tensor] = {}
        self._keys: dict[str, Tensor] = {}

    def site(self) -> Combine:
        """Return the denoiser's output."""
        return Combine(Every(1), site=Site.MODEL)

    def begin(self, run: RunInfo) -> None:
        """Drop the remains of an interrupted call."""
        self._received, self._keys = {}, {}

    def attention(self, step: Step, site: str, query: Tensor, key: Tensor) -> None:
        """Note the attention that tokens receive in the first self-attention of a block."""
        match = _BLOCK.match(site)
        if step.index % self.sampled or match is None or query.shape[2] != key.shape[2]:
            return
        block = f"{match[1]}.{match[2]}"
        if block in self._received:
            return
        self._received[block] = received_attention(query.detach(), key.detach())
        if match[1] not in self._keys:
            self._keys[match[1]] = key.detach()[0].transpose(0, 1).flatten(1)

    def output(self, step: Step, given: Tensor, value: Tensor) -> None:
        """Compare the attention of the blocks with the foreground of the noise prediction."""
        received, self._received = self._received, {}
        keys, self._keys = self._keys, {}
        given, value = given.detach(), value.detach()
        turned = self._frames_first(given, keys)
        if turned:
            given = given.transpose(1, 2)
        grids: dict[tuple[int, ...], Tensor] = {}
        for block, attention in received.items():
            grid = token_grid((value.transpose(1, 2) if turned else value).shape, attention.shape[1])
            if grid is None:
                continue
            if grid not in grids:
                grids[grid] = self._mask(step, value, grid, turned).to(attention.device)
            tokens, frames = grid[0] * grid[1], grid[0]
            ends = (attention[:, -tokens:], attention[:, :tokens])  # text first, text last
            found = [overlap(image, grids[grid], frames) for image in ends]
            sums = torch.tensor([found[0][0], found[1][0], found[0][1]], dtype=torch.float64)
            self.overlaps[block] = self.overlaps.get(block, 0) + sums
            name = block.rpartition(".")[0]
            if name in keys and attention.shape[1] > tokens:
                ends_alike = torch.tensor(alike_at_ends(given, keys.pop(name), grid))
                self.likeness[name] = self.likeness.get(name, 0) + ends_alike.double()

    def _frames_first(self, given: Tensor, keys: dict[str, Tensor]) -> bool:
        """Return whether a film's second axis is that of frames, as far as its tokens show."""
        if given.dim() != 5 or not keys:
            return False
        first = next(iter(keys.values()))
        scores = []
        for film in (given, given.transpose(1, 2)):
            grid = token_grid(film.shape, len(first))
            scores.append(-1.0 if grid is None else max(alike_at_ends(film, first, grid)))
        self.layout += torch.tensor(scores, dtype=torch.float64)
        return bool(self.layout[1] > self.layout[0])

    def _mask(self, step: Step, value: Tensor, grid: tuple[int, ...], turned: bool) -> Tensor:
        """Return the foreground of the image tokens, bool [B, N]."""
        tokens = grid[0] * grid[1]
        if self.foreground is None:
            return foreground_of(patches(value.transpose(1, 2) if turned else value, grid))
        given: Any = self.foreground
        mask = given(step, value) if callable(given) else given
        if not isinstance(mask, Tensor) or mask.shape[-1] != tokens:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"foreground: {shape}, but the output has {tokens} image tokens; give bool [{tokens}] or [B, {tokens}]"
            )
        return mask.bool().expand(len(value), tokens)

    def end(self) -> None:
        """Drop the data of the run."""
        self._received, self._keys = {}, {}

    def state(self) -> dict[str, Tensor]:
        """Return the sums."""
        sums = {f"sums.{name}": value for name, value in self.overlaps.items()}
        ends = {f"likeness.{name}": value for name, value in self.likeness.items()}
        return {**sums, **ends, "layout": self.layout.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums of `state`."""
        self.overlaps = {k[5:]: v.clone() for k, v in state.items() if k.startswith("sums.")}
        self.likeness = {k[9:]: v.clone() for k, v in state.items() if k.startswith("likeness.")}
        self.layout = state["layout"].clone()

    def text_end(self, name: str) -> str:
        """Return the end of the sequence at which a list of blocks has its text tokens; refuse to guess."""
        if self.text is not None or name not in self.likeness:
            return self.text or "first"  # without text both ends are the same
        first, last = (float(end) for end in self.likeness[name])
        if first == last:
            raise ValueError(
                f"text=None: the keys of {name} do not show where its text tokens are; set text='first' or text='last'"
            )
        return "first" if first > last else "last"

    def tables(self) -> dict[str, Tensor]:
        """Return `overlap.<list>` for every list of blocks: float32 [L], NaN where unmeasured.

        Raises:
            ValueError: If nothing was measured, or it cannot be told where text tokens are.
        """
        measured = {block: s for block, s in self.overlaps.items() if s[2] > 0}
        if not measured:
            raise ValueError(
                "no block was profiled: either no block attends to the image's own tokens, or the "
                "noise prediction shows no foreground; give background=[...] or foreground=..."
            )
        lists: dict[str, dict[int, float]] = {}
        for block, sums in measured.items():
            name, _, index = block.rpartition(".")
            total = sums[_ENDS.index(self.text_end(name))]
            lists.setdefault(name, {})[int(index)] = float(total / sums[2])
        return {
            OVERLAP + name: torch.tensor([values.get(index, float("nan")) for index in range(max(values) + 1)])
            for name, values in lists.items()
        }

    def settings(self) -> dict[str, Any]:
        """Return how the profile was made."""
        joint = {name: self.text_end(name) for name in sorted(self.likeness)}
        return {"sampled": self.sampled, "text": joint}


def received_attention(query: Tensor, key: Tensor, queries: int = QUERIES) -> Tensor:
    """Return the attention that each token receives: the mean of the softmax over queries and heads.

    No map of all tokens by all tokens is ever held.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, H, M, D]`, or with fewer heads, each shared by several heads of the queries.
        queries: Most queries to look at, evenly spaced.

    Returns:
        float32 `[B, M]`, each row with the sum 1.
    """
    batch, heads, count, size = query.shape
    if count > queries:
        places = torch.arange(queries, device=query.device) * count // queries
        query, count = query[:, :, places], queries
    keys = key.repeat_interleave(heads // key.shape[1], 1).transpose(2, 3).float()
    rows = max(CHUNK // (batch * heads * keys.shape[3]), 1)
    total = keys.new_zeros(batch, keys.shape[3])
    for part in query.split(rows, 2):
        total += (part.float() @ keys * size**-0.5).softmax(-1).sum((1, 2))
    return total / (heads * count)


def overlap(attention: Tensor, mask: Tensor, frames: int) -> tuple[float, int]:
    """Return the part of the foreground that is attended to, summed over frames that have one, and their number.

    Attention, float, and foreground, bool, are `[B, N]` over the image tokens, frame after frame.
    """
    high = attention > attention.mean(1, keepdim=True)
    both = (high & mask).unflatten(1, (frames, -1)).sum(2).double()
    sizes = mask.unflatten(1, (frames, -1)).sum(2)
    seen = sizes > 0
    return float((both[seen] / sizes[seen]).sum()), int(seen.sum())


def alike_at_ends(sample: Tensor, keys: Tensor, grid: tuple[int, ...]) -> list[float]:
    """Return how alike a sample's tokens and the last, and the first, keys of as many are, as correlations.

    The first row of the sample counts, of more tokens the first; keys `[N, C]` are of text and image. They
    are 0 where the sample has other tokens than the output.
    """
    count = grid[0] * grid[1]
    fits = sample.dim() == 3 or token_grid(sample.shape, count) == grid
    tokens = patches(sample[:1], grid)[0, :count] if fits else sample[:0]
    if len(tokens) < count:
        return [0.0, 0.0]
    some = torch.arange(min(count, SOME), device=sample.device) * count // min(count, SOME)
    return [likeness(tokens[some], image[some]) for image in (keys[-count:], keys[:count])]


def likeness(one: Tensor, two: Tensor) -> float:
    """Return the correlation of the similarities of tokens, over all pairs of them; 0 for none.

    Given are two sets of vectors of the same tokens, `[N, C]` and `[N, D]`, any float dtype.
    """
    if len(one) < 3:
        return 0.0
    pairs = []
    for tokens in (one, two):
        centered = tokens.double() - tokens.double().mean(0)
        unit = torch.nn.functional.normalize(centered, dim=1)
        places = torch.triu_indices(len(unit), len(unit), 1, device=unit.device)
        similar = (unit @ unit.T)[places[0], places[1]]
        pairs.append(torch.nn.functional.normalize(similar - similar.mean(), dim=0))
    return float(pairs[0] @ pairs[1])


_PATCHES = [(frames, size) for frames in (1, 2, 4) for size in (1, 2, 4, 8, 16)]


def token_grid(shape: tuple[int, ...], count: int) -> tuple[int, int, int, int] | None:
    """Return frames, tokens a frame, and patch sizes in time and space of an output's tokens; None for none.

    Of outputs `[B, N, C]`, `[B, C, Y, X]` or `[B, C, F, Y, X]` it is the finest grid of no more tokens than
    there are in the attention, those of text included.
    """
    if len(shape) == 3:
        return (1, shape[1], 1, 1) if shape[1] <= count else None
    if len(shape) not in (4, 5):
        return None
    frames, rows, columns = (1, *shape[2:]) if len(shape) == 4 else shape[2:]
    grids = [
        (frames // time, (rows // size) * (columns // size), time, size)
        for time, size in _PATCHES
        if frames % time == rows % size == columns % size == 0
    ]
    fitting = [grid for grid in grids if grid[0] * grid[1] <= count]
    return max(fitting, key=lambda grid: grid[0] * grid[1], default=None)


def patches(value: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return an output as tokens, `[B, N, C']`, in the order that patch embeddings have."""
    if value.dim() == 3:
        return value
    film = value.unsqueeze(2) if value.dim() == 4 else value
    batch, channels, frames, rows, columns = film.shape
    _, _, time, size = grid
    cut = film.reshape(batch, channels, frames // time, time, rows // size, size, columns // size, size)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, grid[0] * grid[1], -1)


def foreground_of(tokens: Tensor) -> Tensor:
    """Return the tokens whose three principal components have the energy of a foreground, bool `[B, N]`.

    Tokens are `[B, N, C]`, any float dtype; none are, where all are alike.
    """
    centered = tokens.float() - tokens.float().mean(1, keepdim=True)
    _, axes = torch.linalg.eigh(centered.transpose(1, 2) @ centered)
    return above_otsu((centered @ axes[..., -3:]).square().sum(-1))


def above_otsu(values: Tensor) -> Tensor:
    """Return which values `[B, N]` are above Otsu's threshold, which sets two classes furthest apart, bool.

    Exact: every value is tried as the threshold, with no histogram. None are in rows of equal values.
    """
    ordered = values.double().sort(1).values
    count = ordered.shape[1]
    below = torch.arange(1, count + 1, dtype=torch.float64, device=values.device)
    sums = ordered.cumsum(1)
    upper = (count - below).clamp_min(1)
    apart = sums / below - (sums[:, -1:] - sums) / upper
    between = below * (count - below) * apart.square()
    distinct = torch.zeros_like(between)
    distinct[:, :-1] = (ordered[:, 1:] > ordered[:, :-1]).double()  # equal values stay together
    best = (between * distinct).argmax(1, keepdim=True)
    threshold = ordered.gather(1, best)
    return (values.double() > threshold) & (ordered[:, -1:] > ordered[:, :1])
