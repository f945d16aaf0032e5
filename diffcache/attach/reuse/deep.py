"""Split a UNet inside its first and its last block, for `site='deep'`."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from diffcache.attach.anatomy import Anatomy, BlockList
from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.foreign import is_compiled
from diffcache.step import Site


def split(model: nn.Module, anatomy: Anatomy, parts: Combine) -> tuple[Anatomy, Combine]:
    """Return the anatomy and the method of a model whose site `deep` is worked out.

    A UNet's blocks loop over layers of their own: a resnet with its attention, and what changes the
    resolution. Each layer of the way up reads the output of one of the way down, the last layer
    that of `conv_in`, the first of them all. The blocks in which the kept layers end are opened:
    their inner lists become lists of blocks. `lead` and `tail`, in layers and at least one, become
    numbers of calls. Other models are cached at `stack`. Raises AttachError if the UNet's blocks
    have no layers, `lead` is less than `tail`, the schedule is a gate, or a block that has to be
    opened is compiled.
    """
    if not anatomy.is_unet:
        return anatomy, replace(parts, site=Site.STACK)
    if parts.when.waits:
        raise AttachError(
            f"site='deep' with when={parts.when!r}: a gate looks at blocks, and those of a UNet "
            "are split here; use site='stack'"
        )
    lead, tail = max(parts.lead, 1), max(parts.tail, 1)
    if lead < tail:
        raise AttachError(
            f"lead={parts.lead}, tail={tail} at site 'deep': the last {tail} layers of a UNet read "
            f"what its first {tail} return, which then have to run; set lead={tail}"
        )
    if not hasattr(model, "down_blocks"):  # of the original code: its blocks are layers, the first is its conv_in
        return anatomy, replace(parts, site=Site.STACK, lead=lead, tail=tail)
    down, up = _Way(model, "down_blocks"), _Way(model, "up_blocks")
    first, last = down.keep(lead - 1), up.keep(tail)
    anatomy = replace(anatomy, lists=(*anatomy.lists, *down.lists, *up.lists), opened=(*down.opened, *up.opened))
    return anatomy, replace(parts, site=Site.STACK, lead=first, tail=last)


class _Way:
    """The way down or up through a UNet, and the block that has to be opened on it.

    Attributes:
        opened: Path of the block in which the kept layers end, if they end inside one.
        lists: The lists inside it.
    """

    def __init__(self, model: nn.Module, key: str) -> None:
        self.model, self.key, self.is_down = model, key, key == "down_blocks"
        self.opened: tuple[str, ...] = ()
        self.lists: list[BlockList] = []

    def keep(self, layers: int) -> int:
        """Return how many calls the layers at the outer end of the way are; none may end inside a compiled block."""
        calls, blocks = 0, list(self.model.get_submodule(self.key).named_children())
        for index, block in blocks if self.is_down else reversed(blocks):
            if layers == 0:
                break
            whole = len(self._resnets(block))
            if self.is_down and getattr(block, "downsamplers", None) is not None:
                whole += 1  # it returns what a layer of the way up reads
            if layers < whole:
                return calls + self._open(f"{self.key}.{index}", block, layers)
            calls, layers = calls + 1, layers - whole
        return calls

    def _open(self, path: str, block: nn.Module, layers: int) -> int:
        """Open a block; return how many calls some of its layers are."""
        if is_compiled(block):
            raise AttachError(
                f"{path} is compiled, so site 'deep' cannot split it; compile what is inside it, "
                "as model.compile_repeated_blocks() does, or use site='stack'"
            )
        self.opened = (path,)
        depth, width = len(self._resnets(block)), 0
        for name, members in block.named_children():
            if not isinstance(members, nn.ModuleList):
                continue
            in_layers = len(members) % depth == 0 and "samplers" not in name
            width += in_layers and len(members) // depth
            if in_layers or self.is_down:  # what follows the layers on the way up always runs
                classes = tuple(dict.fromkeys(type(member).__name__ for member in members))
                self.lists.append(BlockList(f"{path}.{name}", len(members), classes, 0.0))
        return layers * width

    def _resnets(self, block: nn.Module) -> nn.ModuleList:
        """Return the list that has one member for each layer of a block."""
        resnets = getattr(block, "resnets", None)
        if not isinstance(resnets, nn.ModuleList):
            raise AttachError(
                f"{type(self.model).__name__}: a {type(block).__name__} has no layers called "
                "`resnets`, so site 'deep' cannot split it; use site='stack'"
            )
        return resnets
