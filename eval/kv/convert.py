"""`diffcache kv convert`: a model of grouped queries as one of multi-head latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy

from diffcache.command import Device, Seed, device_of, guarded
from diffcache.eval.metrics.bootstrap import mean_interval
from diffcache.eval.options import CausalModel, Texts
from diffcache.pipelines.demo.console import progress, quiet

_HELD_OUT = 8  # contexts at most, on which perplexity is measured


@guarded
def command(
    model: CausalModel,
    out: Annotated[Path, typer.Option(help="Folder of the new model.")],
    rope: Annotated[
        int | None, typer.Option(help="Rotary channels of a token.", show_default="those of a head")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Channels of a latent.", show_default="as lose nothing")] = None,
    fold: Annotated[int, typer.Option(help="Neighboring frequencies taken for one.")] = 1,
    turned: Annotated[bool, typer.Option("--turned", help="Decompose pairs of channels as complex numbers.")] = False,
    texts: Texts = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a context.")] = 512,
    samples: Annotated[int, typer.Option(min=4, help="Contexts, a quarter held out.")] = 32,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Convert a model of Llama's form into DeepSeek-V3's, which caches small latents (TransMLA).

    Nothing is trained; perplexity of both on contexts held out is printed. All positions and ranks
    (--rope as many channels as all key heads have) lose nothing and save nothing. The new model is
    one of transformers, and takes recipes such as snapkv and kivi.

    [bold]Try[/bold]

        diffcache kv convert --model smollm2 --rope 128 --turned --rank 128 --out smollm2-mla
    """
    from diffcache.eval.kv.command import spread
    from diffcache.eval.kv.text_task import perplexity_of
    from diffcache.eval.kv.texts import TextModel, windows
    from diffcache.kv.hf.transmla import to_mla

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: is there already; name a new folder")
    quiet()
    chosen = TextModel(model, str(device_of(device)))
    drawn = windows(chosen, texts, context, samples, least=4, seed=seed).ids
    least = min(max(len(drawn) // 4, 2), _HELD_OUT)
    held_out, read = drawn[:least], drawn[least:]
    old = chosen.load()
    with progress("reading") as show:
        made = to_mla(old, _told(read, show), rope=rope, rank=rank, fold=fold, turned=turned)
    nats = [torch.stack([_nats(each, ids) for ids in held_out]) for each in (old, made)]
    made.save_pretrained(out)
    chosen.tokenizer.save_pretrained(out)
    config = made.config
    before = 2 * old.config.num_key_value_heads * config.v_head_dim
    after = config.kv_lora_rank + config.qk_rope_head_dim
    typer.echo(f"wrote {out}: a token is held in {after} channels of a layer, before in {before}")
    was, now, ratio = (
        spread(perplexity_of(mean_interval(part)).to_dict()) for part in (nats[0], nats[1], nats[1] - nats[0])
    )
    typer.echo(f"perplexity of {least} contexts of {context} tokens held out: {was} before, {now} now, x {ratio}")
    typer.echo(f"take it: diffcache kv --model {out}")


def _told(ids: tuple[Tensor, ...], show: Any) -> Any:
    for number, each in enumerate(ids):
        show(number, len(ids), "contexts")
        yield each


@torch.no_grad()
def _nats(model: Any, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the tokens after the first, float64."""
    logits = model(ids.to(model.device), use_cache=False).logits[0, :-1].float()
    return cross_entropy(logits, ids[0, 1:].to(model.device)).double().cpu()
