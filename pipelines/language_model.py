"""Load language models, among them those whose code comes with the checkpoint (LLaDA, Dream)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def load_language_model(source: str, dtype: torch.dtype | str = "auto", *, trust_remote_code: bool = False) -> Any:
    """Load a language model, ready to generate.

    Code of LLaDA's and Dream's checkpoints is written for earlier releases of transformers. Members that are missing
    in later ones are added while it is loaded; its files are used as they are.

    Args:
        source: Directory or Hugging Face model ID.
        dtype: Dtype of the weights; "auto" is the one that they were saved in.
        trust_remote_code: Whether code that comes with the checkpoint may run.

    Raises:
        OSError: If there is no such model.
        ValueError: If it comes with code, and that is not trusted.
    """
    more: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(source, **more)
    if not hasattr(config, "use_cache"):
        config.use_cache = False  # LLaDA's forward reads it
    codes = getattr(config, "auto_map", None) or {}
    has_none = codes and AutoModelForCausalLM.__name__ not in codes
    auto = AutoModel if has_none else AutoModelForCausalLM
    with ExitStack() as stack:
        if codes and trust_remote_code:
            code = get_class_from_dynamic_module(codes[auto.__name__], source)
            stack.enter_context(_earlier_transformers(code))
        model: Any = auto.from_pretrained(source, config=config, dtype=dtype, **more)
    if hasattr(model, "reset_rope_parameters"):  # Dream's frequencies are not in the checkpoint
        model.reset_rope_parameters()
    return model.eval()


@contextmanager
def _earlier_transformers(code: Any) -> Iterator[None]:
    """Add to a class of models, `code`, the members of transformers 4 that it expects."""
    tie = code.tie_weights
    takes_none = len(inspect.signature(tie).parameters) == 1  # only `self`, as LLaDA's does
    lacks_rope = "default" not in ROPE_INIT_FUNCTIONS
    names = vars(inspect.getmodule(code)).values()
    own: list[Any] = [x for x in names if inspect.isclass(x) and issubclass(x, GenerationConfig)]
    # Dream checks settings of its own, and takes less than transformers 5 calls that with.
    checks = {kind: kind.validate for kind in own}
    checks.pop(GenerationConfig, None)
    if lacks_rope:
        ROPE_INIT_FUNCTIONS["default"] = _frequencies
    if takes_none:
        code.tie_weights = lambda model, *args, **kwargs: tie(model)
    for kind in checks:
        kind.validate = lambda *args, **kwargs: None
    code.all_tied_weights_keys = {}  # LLaDA's instances have none of their own
    try:
        yield
    finally:
        del code.all_tied_weights_keys
        for kind, check in checks.items():
            kind.validate = check
        if takes_none:
            code.tie_weights = tie
        if lacks_rope:
            del ROPE_INIT_FUNCTIONS["default"]


def _frequencies(config: Any, device: Any = None, **_: Any) -> tuple[Tensor, float]:
    """Return the frequencies of a plain rotary embedding, `[D / 2]`, and its scale."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    powers = torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float)
    return 1.0 / (config.rope_theta ** (powers / size)), 1.0
