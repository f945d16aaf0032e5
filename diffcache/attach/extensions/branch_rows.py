"""Computes attention and feed-forward of some rows in each layer, and serves what it holds of them.

A call of the wrapped model is given all tokens and a `BranchPlan`. Every layer's own forward runs
on all rows; its attention and feed-forward modules are given the rows that are computed, and return
those outputs among the ones held of the other rows. Of blocks that attend themselves, as LLaDA's,
the linear layers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.attention import Door
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.attention_sdpa import Placed, calls_sdpa, place_rows
from diffcache.attach.call import Call, current_call, in_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.extensions.branch_layers import (
    ENTRIES,
    EXITS,
    BranchTap,
    BranchTurn,
    HeldLayer,
    check_plain,
    check_same,
    layers_of,
    put,
)
from diffcache.attach.extensions.row_inputs import (
    IDS,
    PLAN,
    POSITIONS,
    VALID,
    Held,
    check_held,
    check_sees_all,
    first_position,
    given_tokens,
    mark_of,
    places_of,
)
from diffcache.attach.extensions.rows import check_arguments
from diffcache.attach.record import TOKEN_LAYERS
from diffcache.attach.run import Run
from diffcache.attach.tap import Tap, tap_children, untap_children
from diffcache.dllm.dllm_cache import BranchPlan, BranchRows
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.errors import AttachError
from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.slots import SlotIndex

HIDDEN, TABLES, CACHE = "hidden_states", "position_embeddings", "past_key_values"  # of attention


class Branches(Extension):
    """Computes the rows of every layer that are due, and serves the others.

    Args:
        denoiser: The attachment to the model.
        ability: Ability that chooses rows of the answer.
    """

    def __init__(self, denoiser: Denoiser, ability: BranchRows) -> None:
        self.denoiser, self.ability = denoiser, ability
        self.model = denoiser.anatomy.model
        self.layers = layers_of(denoiser)
        self.paths = [f"{layer.path}.{layer.attention}".rstrip(".") for layer in self.layers]
        self.numbers = {path: number for number, path in enumerate(self.paths)}
        self.first = first_position(denoiser.model)
        self.is_direct = calls_sdpa(denoiser.model)  # and leaves padding to us
        self.others: tuple[None, ...] = (None,)  # that attention returns besides its output
        self.is_tried = False  # whether a row alone was computed of blocks that attend themselves
        self.door = Door(denoiser.model, self)
        self.displace: Callable[[], None] | None = None
        if POSITIONS not in denoiser.arguments:
            try:
                self.displace = place_rows(denoiser.model, self.door.sites, self._placed)
            except BaseException:
                self.door.remove()
                raise
        self.parents = [denoiser.model.get_submodule(layer.path) for layer in self.layers]
        self.values = [getattr(parent, "v_proj", None) for parent in self.parents]
        for number, (parent, layer) in enumerate(zip(self.parents, self.layers, strict=True)):
            serve: dict[str, Callable[..., Any]] = {
                layer.attention: self.attention, layer.mlp: self.feed_forward,
            }  # fmt: skip
            if not layer.attention:
                serve = {name: partial(self.linear, name) for name in (*ENTRIES, *EXITS)}
            taps: dict[str, Tap] = {
                name: BranchTap(parent.get_submodule(name), partial(method, number))
                for name, method in serve.items()
            }
            tap_children(parent, denoiser, taps)

    def remove(self) -> None:
        """Give the model its attention function and modules back."""
        if self.displace is not None:
            self.displace()
        self.door.remove()
        for parent in self.parents:
            untap_children(parent)

    def tensors(self, run: Run) -> Iterator[Tensor]:
        """Yield what is held of a run."""
        held: Held[HeldLayer] | None = run.storage.get(self)
        layers = [] if held is None else held.layers
        for layer in layers:
            yield from layer.kv.tensors()
        for layer in layers:
            yield from (x for x in (layer.attention, layer.mlp) if x is not None)

    # a call ----------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Note what layers do in this call."""
        given = self.denoiser.named(call.args, call.kwargs)
        plan = given.pop(PLAN, None)
        if plan is None:
            return call
        if not isinstance(plan, BranchPlan):
            raise AttachError(
                f"{PLAN}={plan!r}: must be what plan() of {self.denoiser.handle.method!r} returns"
            )
        for layer, parent in zip(self.layers, self.parents, strict=True):
            check_plain(layer.path, parent)  # which may be compiled since it was wrapped
        ids, valid = given_tokens(self.model, given)
        shape = ids.shape[0], ids.shape[1]
        held: Held[HeldLayer] | None = call.run.storage.get(self)
        if plan.renews_prompt and plan.renews_answer:
            held = self._start(held, ids, valid)
        else:
            check_held(self.model, held, ids, valid)
        assert held is not None
        if call.run.is_told or call.run.in_pipeline:  # else no call comes after this one
            call.run.storage[self] = held
        call.storage[self] = BranchTurn(plan, held)
        if self.is_direct:  # each takes padding in another form, and we mask it
            given[VALID] = None
        if self.displace is None:
            given[POSITIONS] = held.positions.expand(*shape)
        return replace(call, args=(), kwargs=given)

    def _start(
        self, held: Held[HeldLayer] | None, ids: Tensor, valid: Tensor | None
    ) -> Held[HeldLayer]:
        """Return what a call of all rows writes to."""
        shape = ids.shape[0], ids.shape[1]
        at, mask = places_of(ids, valid, self.first)
        if held is not None and held.shape == shape:
            return replace(held, positions=at, mask=mask, mark=mark_of(valid))
        layers = [HeldLayer(KVLayer(number)) for number in range(len(self.layers))]
        return Held[HeldLayer](shape, layers, at, mask, mark_of(valid))

    def close(self, call: Call, out: Any) -> Any:
        """Raise AttachError unless every layer took part, and once unless rows can be alone."""
        turn: BranchTurn | None = call.storage.get(self)
        if turn is not None and len(turn.finished) != len(self.layers):
            raise AttachError(
                f"{self.model}: {len(turn.finished)} of {len(self.layers)} layers took part in a "
                "call; call the model without what leaves layers out"
            )
        if turn is not None and not (self.is_tried or self.layers[0].attention):
            self._check_alone(call, turn, out[0])
            self.is_tried = True
        return out

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return how many tokens all layers together computed and left out.

        Operations are those of the linear layers, values of the answer's rows among them, and of
        attention.
        """
        turn: BranchTurn | None = call.storage.get(self)
        if turn is None:
            return {}
        batch, width = turn.held.shape
        rows, computed, whole = 0, 0, 0
        for number, layer in enumerate(self.layers):
            plan = turn.rows[number]
            count = 0 if plan is None else plan.count(width)
            each = layer.weights + turn.held.layers[number].products
            rows += count
            whole += width * each
            computed += count * each
            if self._looks(turn.plan, number):
                computed += (width - turn.plan.prompt) * layer.value_weights
        call.record.flops = float(2 * batch * computed), float(2 * batch * (whole - computed))
        return {TOKEN_LAYERS: (batch * rows, batch * (width * len(self.layers) - rows))}

    # the parts of a layer ----------------------------------------------------------------------

    def attention(self, number: int, module: Any, *args: Any, **given: Any) -> Any:
        """Return the output of a layer's attention, some rows of it computed."""
        turn = self._turn()
        if turn is None:
            return module(*args, **given)
        held = turn.held.layers[number]
        if args or not isinstance(given.get(HIDDEN), Tensor):
            raise AttachError(f"{self.model}: {self.paths[number]} is not called with {HIDDEN}=...")
        rows = turn.rows[number] = self._rows(turn, number, module.v_proj, given[HIDDEN])
        if rows is None:
            return held.attention, *self.others
        is_first = not held.kv.seen
        out = self._run(turn, number, module, given)
        held.attention = put(held.attention, rows, out)
        if is_first:
            self._check_row(turn, number, module, given)
        return held.attention, *self.others

    def feed_forward(self, number: int, module: Any, *args: Any, **given: Any) -> Any:
        """Return the output of a layer's feed-forward, some rows of it computed."""
        turn = self._turn()
        if turn is None:
            return module(*args, **given)
        path = f"{self.layers[number].path}.{self.layers[number].mlp}"
        if number not in turn.rows or len(args) != 1 or given:
            raise AttachError(
                f"{self.model}: {path} is not called with one tensor, after the layer's attention"
            )
        rows, held = turn.rows[number], turn.held.layers[number]
        turn.finished.add(number)
        if rows is None:
            return held.mlp
        fresh = module(rows.take(args[0]))
        if not isinstance(fresh, Tensor):
            raise AttachError(
                f"{self.model}: {path} returns {type(fresh).__name__}, not a tensor of its rows "
                "(a mixture of experts may add its routing); use a policy of rows, such as "
                "DKVCache()"
            )
        if held.mlp is None:
            check_same(self.model, path, module(args[0][:, -1:]), fresh[:, -1:])
        held.mlp = put(held.mlp, rows, fresh)
        return held.mlp

    def linear(self, name: str, number: int, module: Any, x: Tensor) -> Tensor:
        """Return the output of a linear layer of a block that attends itself."""
        turn = self._turn()
        if turn is None:
            return module(x)  # type: ignore[no-any-return]
        if name == ENTRIES[0]:
            turn.number = number
            if number not in turn.rows:
                turn.rows[number] = self._rows(turn, number, self.values[number], x)
        rows = turn.rows[number] or RowPlan(range(0))
        if name in ENTRIES:
            return module(rows.take(x))  # type: ignore[no-any-return]
        held, kind = turn.held.layers[number], EXITS[name]
        out = put(getattr(held, kind), rows, module(x))
        setattr(held, kind, out)
        if kind == "mlp":
            turn.finished.add(number)
        return out

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Write keys and values of the rows; where they are some, attend to all that is held."""
        turn = self._turn()
        if turn is None:
            return None
        number = self.numbers[site.path]
        held, rows = turn.held.layers[number], turn.rows[number]
        if rows is None:  # of a block that attends itself
            return call.q
        turn.attended = True
        held.products = 2 * turn.held.shape[1] * call.q.shape[2] * call.q.shape[3]
        k, v = call.k.transpose(1, 2), call.v.transpose(1, 2)
        if not held.kv.seen:
            check_sees_all(self.model, site, call, None if self.is_direct else turn.held.mask)
            held.kv.write(k, v)
        else:
            at: SlotIndex | range = range(k.shape[2])
            if isinstance(rows.rows, range):
                at = rows.rows
            elif rows.rows is not None:  # found among the answer's rows, so that all are there
                at = SlotIndex(rows.rows, 0, turn.held.shape[1])
            held.kv.overwrite(at, k, v)
        if rows.rows is None and not self.is_direct:
            return None  # the model's own
        mask = turn.held.mask
        mask = None if mask is None else mask.expand(-1, -1, call.q.shape[1], -1)
        query = Query(call.q.transpose(1, 2), 0, call.scale, mask=mask, causal=False)
        return attend(query, held.kv.views()).transpose(1, 2).contiguous()

    def _turn(self) -> BranchTurn | None:
        """Return what layers do in the call that this thread is in; None for the model's own."""
        around = current_call()
        if around is None or around.owner is not self.denoiser:
            return None
        turn: BranchTurn | None = around.storage.get(self)
        return turn

    # rows ------------------------------------------------------------------------------------

    def _looks(self, plan: BranchPlan, number: int) -> bool:
        """Return whether a layer chooses rows of the answer by their values."""
        return number > 0 and not plan.renews_answer and self.ability.ratio > 0

    def _placed(self) -> Placed | None:
        """Return the rows of the layer at hand, None where these are all or there is no plan."""
        turn = self._turn()
        rows = ALL if turn is None else turn.rows[turn.number] or RowPlan(range(0))
        return None if turn is None or rows.rows is None else (rows.rows, turn.held.shape[1])

    def _rows(self, turn: BranchTurn, number: int, v_proj: Any, x: Tensor) -> RowPlan | None:
        """Return the rows that a layer computes, None for none; renew values that it looks at."""
        plan, width = turn.plan, turn.held.shape[1]
        if number == 0 or (plan.renews_prompt and plan.renews_answer):
            return ALL
        if plan.renews_answer:
            return RowPlan(range(plan.prompt, width))
        if not self._looks(plan, number):
            return RowPlan(range(plan.prompt)) if plan.renews_prompt and plan.prompt else None
        held = turn.held.layers[number]
        new = v_proj(x[:, plan.prompt :])
        rows = plan.prompt + self.ability.choose(new, held.values(plan.prompt))
        held.renew_values(plan.prompt, new)
        if plan.renews_prompt:
            every = torch.arange(plan.prompt, device=rows.device).expand(len(rows), -1)
            rows = torch.cat([every, rows], dim=1)
        return RowPlan(rows) if rows.shape[1] else None

    def _run(self, turn: BranchTurn, number: int, module: Any, given: dict[str, Any]) -> Tensor:
        """Return the output of a layer's attention for its rows, `[B, n, D]`."""
        rows = turn.rows[number]
        assert rows is not None
        some: dict[str, Any] = {HIDDEN: rows.take(given[HIDDEN])}
        tables = given.get(TABLES)
        if isinstance(tables, Tensor):  # one complex table, as in Llama 4
            some[TABLES] = rows.take(tables)
        elif tables is not None:
            some[TABLES] = tuple(rows.take(table) for table in tables)
        if given.get(POSITIONS) is not None:
            some[POSITIONS] = rows.take(given[POSITIONS])
        if given.get(CACHE) is not None:  # which would take every row once more
            some[CACHE] = None
        turn.attended = False
        out = module(**given | some)
        if not turn.attended or not isinstance(out, tuple):
            raise AttachError(
                f"{self.model}: {self.paths[number]} did not attend as wrapped; its attention "
                "function was replaced since: unwrap the model and wrap it again"
            )
        fresh: Tensor = out[0]
        self.others = (None,) * (len(out) - 1)
        return fresh

    # checks ------------------------------------------------------------------------------------

    def _check_row(self, turn: BranchTurn, number: int, module: Any, given: dict[str, Any]) -> None:
        """Raise AttachError unless the last row alone is what it was; the host waits."""
        held, prompt, width = turn.held.layers[number], turn.plan.prompt, turn.held.shape[1]
        assert held.attention is not None
        kept, held.kv = held.kv, held.kv.fork()
        turn.rows[number] = RowPlan(range(width - 1, width))
        held.renew_values(prompt, module.v_proj(given[HIDDEN][:, prompt:]))
        row = self._run(turn, number, module, given)
        check_same(self.model, self.paths[number], row, held.attention[:, -1:])
        held.kv, turn.rows[number] = kept, ALL

    @torch.no_grad()
    def _check_alone(self, call: Call, turn: BranchTurn, logits: Tensor) -> None:
        """Raise AttachError unless the last row alone in every layer is what it was."""
        width, held = turn.held.shape[1], turn.held
        layers = [replace(layer, kv=layer.kv.fork()) for layer in held.layers]
        trial = BranchTurn(turn.plan, replace(held, layers=layers))
        trial.rows |= dict.fromkeys(range(len(layers)), RowPlan(range(width - 1, width)))
        given = self.denoiser.named(call.args, call.kwargs)
        with in_call(replace(call, repeats=True, storage={self: trial})):
            again = self.denoiser.model.forward(**given)[0]
        check_same(self.model, self.layers[0].path, again[:, -1:], logits[:, -1:])


def install(denoiser: Denoiser, ability: BranchRows) -> Branches:
    """Return the extension that holds outputs of attention and feed-forward.

    Raises:
        AttachError: If the model is none of transformers, takes no positions, or has layers of
            another kind.
    """
    check_arguments(denoiser, IDS, VALID)
    branches = Branches(denoiser, ability)
    if {site.path for site in branches.door.sites} != set(branches.paths):
        branches.remove()
        raise AttachError(
            f"{branches.model}: has {len(branches.layers)} layers and {len(branches.door.sites)} "
            "attentions; tokens must meet in the attention of its layers alone"
        )
    return branches
