"""Turn a model of grouped queries into one of multi-head latent attention, in DeepSeek-V3's form.

Heads of keys are merged into one, turned so that few rotary channels hold most of them, and what is
left of keys goes with the values into latents of lower rank. Nothing is trained.

Reference: TransMLA, arXiv 2502.07864: RoRoPE and FreqFold (section 4.2), balanced joint PCA of keys
and values (section 4.3); code at github.com/fxmeng/TransMLA. Departures: both decompositions are of
what the original model reads, where the code runs the model again between them; the norm of all
channels of values is balanced, where the code leaves the first out; one channel of the latents is a
constant that keeps DeepSeek's norm of them from acting, where the code changes the model's class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import AttachError

_FORMS = ("LlamaForCausalLM", "MistralForCausalLM")
_ROPES = ("default", "linear", "llama3")  # those that treat each frequency on its own
_SHARED = (
    "input_layernorm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "self_attn.o_proj",
)


def to_mla(
    model: Any,
    ids: Iterable[Tensor],
    *,
    rope: int | None = None,
    rank: int | None = None,
    fold: int = 1,
    turned: bool = False,
    balance: float = 1.0,
) -> Any:
    """Return a `DeepseekV3ForCausalLM` that says what a model of grouped queries says.

    A token is held in `rope + rank + 1` channels of a layer, and was in twice `H * D`, with H
    key-value heads of D channels. It loses nothing where all of keys keep their positions
    (`rope = H * D`, `rank = H * D`), or where one key-value head is all there is.

    Args:
        model: Model of Llama's form: no biases, and positions that treat frequencies one by one.
        ids: Token ids of texts, int64 [B, T] each, on which it is decomposed.
        rope: Rotary channels of a token; None for D. Fewer, if they divide D, leave frequencies
            out. More are a multiple of D; their frequencies are said by factors of longrope, which
            engines other than transformers may not read.
        rank: Channels of a latent; None for as many as lose nothing.
        fold: Neighboring frequencies that are taken for one, FreqFold's M, a divisor of D / 2.
        turned: Decompose pairs of channels as complex numbers, which puts more of keys into as many
            rotary channels with `fold=1`; the paper turns both channels of a pair alike.
        balance: Norm of values in the joint decomposition, by that of keys.

    Raises:
        AttachError: If the model is not of that form.
        ValueError: If a number does not fit the model, or there are no texts.

    Reference: TransMLA, arXiv 2502.07864. Departure: `turned` is not in the paper.
    """
    from transformers import DeepseekV3ForCausalLM

    _check_form(model)
    config = model.config
    heads, size = config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    rope = size if rope is None else rope
    whole = 2 * heads * size - rope
    rank = whole if rank is None else rank
    _check_numbers(heads, size, rope, rank, fold, balance)
    moments = _moments(model, ids)
    with torch.random.fork_rng(devices=[]):  # its first weights, none of which stays, are drawn
        made = DeepseekV3ForCausalLM(_config(model, rope, rank, fold)).to(model.dtype)
    weights = {}
    for name, value in model.state_dict().items():
        if name.startswith("model.layers."):
            number, part = name.removeprefix("model.layers.").split(".", 1)
            if part.removesuffix(".weight") not in _SHARED:
                continue
        weights[name] = value
    for number, (layer, moment) in enumerate(zip(model.model.layers, moments, strict=True)):
        parts = _attention(layer.self_attn, moment, heads, size, rope, rank, fold, turned, balance)
        at = f"model.layers.{number}.self_attn."
        weights |= {at + name: value.to(model.dtype) for name, value in parts.items()}
        weights[at + "o_proj.bias"] = torch.zeros(config.hidden_size)
    made.load_state_dict(weights)
    made.generation_config = deepcopy(model.generation_config)
    return made.to(model.device).eval()


def _check_form(model: Any) -> None:
    name, config = type(model).__name__, model.config
    wrong = None
    if name not in _FORMS:
        wrong = f"is no {' or '.join(_FORMS)}"
    elif getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        wrong = "has biases"
    elif getattr(config, "sliding_window", None) is not None:
        wrong = f"has sliding_window={config.sliding_window}"
    elif config.rope_parameters["rope_type"] not in _ROPES:
        kind = config.rope_parameters["rope_type"]
        wrong = f"has rope_type={kind!r}, and only {', '.join(_ROPES)} are served"
    elif any(
        type(part) is not nn.Linear
        for layer in model.model.layers
        for name, part in layer.named_modules()
        if name.endswith("_proj")
    ):
        wrong = "has projections that are no plain nn.Linear"
    if wrong:
        raise AttachError(f"{name} {wrong}: give a model of Llama's form with weights as trained")


def _check_numbers(heads: int, size: int, rope: int, rank: int, fold: int, balance: float) -> None:
    if fold < 1 or size // 2 % fold:
        raise ValueError(f"fold={fold}: must divide the {size // 2} frequencies of a head")
    most = heads * size
    if rope < 2 or rope > most or rope % 2 or (size % rope and rope % size):
        raise ValueError(
            f"rope={rope}: must be even, divide the {size} channels of a head or be a multiple of "
            f"them, and be at most {most}"
        )
    if rope * fold % size:
        raise ValueError(f"rope={rope} keeps a frequency of {size // rope}: fold={fold} must be a multiple of that")
    if not 1 <= rank <= 2 * most - rope:
        raise ValueError(f"rank={rank}: must be from 1 to {2 * most - rope}, which loses nothing")
    if not 0 < balance < math.inf:
        raise ValueError(f"balance={balance}: must be positive")


def _moments(model: Any, ids: Iterable[Tensor]) -> list[Tensor]:
    """Return the second moments of what attention reads in each layer, float64 [in, in]."""
    found: list[Tensor] = []
    seen = 0

    def note(number: int) -> Callable[..., None]:
        def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].detach().flatten(0, -2)
            x = x if x.dtype == torch.float64 else x.float()
            found[number] += (x.T @ x).double().cpu()

        return add

    with ExitStack() as stack, torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            width = layer.self_attn.k_proj.in_features
            found.append(torch.zeros(width, width, dtype=torch.float64))
            hook = layer.self_attn.k_proj.register_forward_pre_hook(note(number))
            stack.callback(hook.remove)
        for each in ids:
            model(each.to(model.device), use_cache=False, logits_to_keep=1)
            seen += each.numel()
    if not seen:
        raise ValueError("ids: no tokens; give token ids of a few texts, each int64 [B, T]")
    return [moment / seen for moment in found]


def _config(model: Any, rope: int, rank: int, fold: int) -> Any:
    """Return the configuration of the model that is made."""
    from transformers import DeepseekV3Config

    old, size = model.config, model.model.layers[0].self_attn.head_dim
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act",
             "num_attention_heads", "max_position_embeddings", "initializer_range", "rms_norm_eps",
             "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
             "attention_dropout")  # fmt: skip
    positions = dict(old.rope_parameters)
    if rope > size:
        theta = positions["rope_theta"]
        ours = theta ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
        wanted = model.model.rotary_emb.inv_freq.cpu().double()[_frequencies(size, rope, fold)]
        factors = (ours / wanted).tolist()
        positions = {
            "rope_type": "longrope",
            "rope_theta": theta,
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": old.max_position_embeddings,
        }
    return DeepseekV3Config(
        **{name: getattr(old, name) for name in names},
        num_key_value_heads=old.num_attention_heads,
        first_k_dense_replace=old.num_hidden_layers,
        num_mtp_layers=0,
        q_lora_rank=None,
        kv_lora_rank=rank + 1,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=size,
        v_head_dim=size,
        attention_bias=True,
        rope_parameters=positions,
    )


def _frequencies(size: int, rope: int, fold: int) -> Tensor:
    """Return the frequency of each rotary pair that is left, int64 [rope / 2]."""
    kept = rope * fold // size  # pairs of a fold that keep their position
    inside = torch.arange(kept) * max(size // rope, 1) % fold
    return (torch.arange(size // 2 // fold)[:, None] * fold + inside).flatten()


def _attention(
    attention: Any,
    moment: Tensor,
    heads: int,
    size: int,
    rope: int,
    rank: int,
    fold: int,
    turned: bool,
    balance: float,
) -> dict[str, Tensor]:
    """Return the weights of an attention layer with latents."""
    q, k, v = (getattr(attention, f"{n}_proj").weight.detach().cpu().double() for n in "qkv")
    width = q.shape[1]
    pairs = torch.complex(*k.view(heads, 2, size // 2, width).unbind(1))
    turn = _turn(pairs, moment, fold, turned)  # [folds, components, heads, fold]
    kept = rope * fold // size
    full = turn.new_zeros(*turn.shape[:3], size // 2)
    for number, each in enumerate(turn):
        full[number, ..., number * fold : (number + 1) * fold] = each
    placed, plain = full[:, :kept].flatten(0, 1), full[:, kept:].flatten(0, 1)

    # Queries meet rotary keys in their new channels, and plain ones in the channels of a head.
    per = q.shape[0] // size // heads
    asked = q.view(heads * per, 2, size // 2, width)
    mine = placed.repeat_interleave(per, 1)
    rotary = torch.einsum("rhd,hdx->hrx", mine, torch.complex(asked[:, 0], asked[:, 1]))
    rotary = torch.view_as_real(rotary).transpose(2, 3).flatten(1, 2)  # pairs lie side by side
    scale = math.sqrt((size + rope) / size)  # DeepSeek divides by the root of both together
    queries = torch.cat([q.view(-1, size, width), rotary], 1).flatten(0, 1) * scale

    left = torch.einsum("rhd,hdx->rx", plain, pairs)
    left = torch.cat([left.real, left.imag])
    norm_k, norm_v = (((w @ moment) * w).sum(1).sqrt() for w in (left, v))
    ratio = norm_k.mean() / (norm_v.mean() * balance) if len(left) and norm_k.any() else 1.0
    joint = torch.cat([left / ratio, v])
    basis = torch.linalg.eigh(joint @ moment @ joint.T).eigenvectors[:, -rank:].flip(1)
    back = plain.conj().permute(1, 2, 0)  # [heads, size / 2, plain pairs]
    key = torch.cat([torch.cat([back.real, -back.imag], 2), torch.cat([back.imag, back.real], 2)], 1)
    key = ratio * key @ basis[: len(left)]
    value = basis[len(left) :].view(heads, size, rank)
    up = torch.cat([key, value], 1).repeat_interleave(per, 0).flatten(0, 1)

    # A constant that is far larger than the rest is all that the norm of latents sees.
    constant = 2.0**15 if attention.k_proj.weight.dtype == torch.float16 else 2.0**20
    root = constant / math.sqrt(rank + 1)
    gain = 2.0 ** round(math.log2(root))
    rows = torch.view_as_real(torch.einsum("rhd,hdx->rx", placed, pairs))
    down = [basis.T @ joint, q.new_zeros(1, width), rows.transpose(1, 2).flatten(0, 1)]
    bias, norm = q.new_zeros(rank + 1 + rope), q.new_full((rank + 1,), gain)
    bias[rank], norm[rank] = constant, 0
    return {
        "q_proj.weight": queries,
        "kv_a_proj_with_mqa.weight": torch.cat(down),
        "kv_a_proj_with_mqa.bias": bias,
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": torch.cat([up * root / gain, up.new_zeros(len(up), 1)], 1),
    }


def _turn(pairs: Tensor, moment: Tensor, fold: int, turned: bool) -> Tensor:
    """Return the components of merged keys, the largest of each fold first.

    Args:
        pairs: Key projection by pairs of rotary channels, complex [H, D / 2, in].
        moment: Second moments of its input, [in, in].
        fold: Frequencies that are taken for one.
        turned: Decompose complex numbers; else real and imaginary parts alike.

    Returns:
        complex [D / 2 / fold, H * fold, H, fold]: folds, their components, and how much of each
        pair of channels of each head is in them.
    """
    heads, count = pairs.shape[:2]
    found = []
    for start in range(0, count, fold):
        rows = pairs[:, start : start + fold].flatten(0, 1)
        gram = rows @ moment.to(rows.dtype) @ rows.mH
        vectors = torch.linalg.eigh(gram if turned else gram.real).eigenvectors.flip(1)
        found.append(vectors.mH.to(rows.dtype).view(-1, heads, fold))
    return torch.stack(found)
