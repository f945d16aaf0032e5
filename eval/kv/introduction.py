"""The hand-written beginning of `docs/kv.md`."""

INTRODUCTION = """\
# Key-value caches

One store of keys and values for language models, diffusion language models and causal video, and
the methods of the literature as short compositions on it. A slot has metadata (position, rotary
position, how many tokens it stands for, tag, version, statistics), so that order, padding,
chunking, going on and going back are right by construction; rows may be ragged; what a method
saves is counted as the bytes of unique storages. The tables below are written by `python -m
diffcache.eval.kv.page --write` from the docstrings, the recipes themselves and the records in
`assets/bench/`; a test holds the page to them.

## Use

```python
from diffcache.kv import cache_for, kivi, snapkv

cache = cache_for(model, "snapkv", budget=256)  # or a recipe: snapkv(256) | kivi(bits=2)
out = model.generate(**inputs, past_key_values=cache)
print(cache.nbytes, cache.mode, cache.why)
```

`model` is any model of transformers that goes through its attention interface. A cache serves one
generation or one conversation: give it to the next call with the ids of the whole conversation.
Left-padded batches, grouped queries, hybrids with sliding layers (those stay as they are), chunked
prompts, beam search and assisted decoding work as without it. `cache.fork()` goes on from the same
content in two ways, `cache.settle()` compresses now, `diffcache.kv.detach(model)` gives the model
its own attention function back.

### Modes

| mode | what it does | when |
|---|---|---|
| `"stock"` | hands decoded keys and values to the model's own attention | nothing is dropped and all is read: codecs, low rank |
| `"native"` | the model is told to use the attention function `"diffcache"`, which attends over slots by their positions | everything else |
| `"auto"` | takes stock where it can, else native; `cache.why` says why | the default |

In stock mode no queries are seen, rows must be equally long, and prompts must not be padded if
slots are dropped. In native mode other caches of the same model are served as `"sdpa"` serves them;
attention weights are not returned.

### Composition

A recipe is a frozen dataclass: `score` and `budget` say what `plan` keeps, `merge` what the kept
slots take over, `codec` and `ladder` how they are held, `retrieve` what a query reads, `trigger`
when it happens. `a | b` does what both say and is refused where they contradict each other:

```python
from diffcache.kv import kivi, quest, snapkv

snapkv(0.5) | kivi(bits=4, residual=32)  # evict, then quantize what is left
kivi(bits=4) | quest(256)  # hold all in four bits, read 256 slots
```

Every recipe is in `diffcache.kv` under its name; names on the command line may have `-` for `_`. A
budget is a whole number of slots, 2 or more, or a float, a share of the tokens of each row; 1.0
keeps everything, and a whole 1 is refused, as it could mean either. On the command line the same
is one word, and `@name` reads a table that was found offline (`python -m
diffcache.eval.kv.prepare`):

```sh
diffcache kv --list
diffcache kv --recipe "snapkv:budget=0.5|kivi:bits=4" --recipe keydiff:budget=0.25
diffcache kv --recipe duo_attention:budget=0.25,heads=@duo_attention,sinks=4
```

### Save and load

```python
from diffcache.kv.life.save import load, save

save("talk.safetensors", cache.store)
load("talk.safetensors", cache_for(model, recipe).store)  # of the same model and recipe
```

What goes on from a loaded cache is bit for bit what would have gone on. A truncated or altered file
is refused. `diffcache.kv.life` also has a prefix tree with times to live, tiers and packing;
`diffcache.kv.reuse` puts caches of pieces together (CacheBlend, Cache-Craft, KVShare, PIE, APE,
Hydragen); `diffcache.kv.refresh` writes over what has become stale, as diffusion language models
and video need it.

### What is not supported

- Layers with a sliding window, of states (Mamba) or that read the keys of other layers are left as
  they are, and are not counted. A model whose every layer is such is refused.
- Models that change keys between the cache and attention are refused in native mode, with the way
  out in the message.
- Recipes with ragged rows and recipes that score change shapes as they go; the compiled graph of a
  static cache is served by `static_cache_for`, for first and latest tokens.
- Saving covers the layers of full attention; sliding layers are read anew.
- Slots that were dropped or coded cannot be taken back: `rollback` reaches to the last compression.
"""  # noqa: E501 - rows of tables are lines
