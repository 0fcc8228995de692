"""Tokenizer and model must agree on special tokens, or the model is never taught to stop.

Some trainers align the two with a warning and go on; which side was right is then a guess.
"""

from __future__ import annotations

from typing import Any

from surefoot.errors import ModelError


def check_special_tokens(name: str, net: Any, tokenizer: Any) -> frozenset[int]:
    """The set of stop ids, the union of what model and tokenizer declare; refuses a disagreement.

    Args:
        net: a Hugging Face model with `config` and `generation_config`.
    """
    rows = net.get_input_embeddings().weight.shape[0]
    _check_size(name, rows, tokenizer)
    generation = getattr(net, "generation_config", None)
    said = [getattr(each, "eos_token_id", None) for each in (net.config, generation)]
    declared = frozenset(number for value in said for number in _ids(name, value))
    own = tokenizer.eos_token_id
    if own is None or not declared:
        raise ModelError(
            f"model {name!r}: no end token ({'tokenizer' if own is None else 'model'} declares none)",
            "completions would run to the length limit, and stopping is never trained",
            "set eos_token in tokenizer_config.json and eos_token_id in config.json",
        )
    if own not in declared:
        raise ModelError(
            f"model {name!r}: the tokenizer ends on {own} ({tokenizer.eos_token!r}), the model on {sorted(declared)}",
            "one side would never stop where the other does; guessing which is right trains the wrong stop token",
            "make eos_token_id in config.json and generation_config.json include the tokenizer's eos_token",
        )
    outside = sorted(i for i in declared | {own} if not 0 <= i < rows)
    if outside:
        raise ModelError(
            f"model {name!r}: stop ids {outside} are outside its {rows} rows",
            "they cannot be sampled",
            "fix config.json",
        )
    return frozenset(declared | {own})


def _check_size(name: str, rows: int, tokenizer: Any) -> None:
    if len(tokenizer) > rows:
        raise ModelError(
            f"model {name!r}: the tokenizer has {len(tokenizer)} tokens, the model {rows} embedding rows",
            "an id beyond the table reads another tensor or crashes late",
            "use the tokenizer that belongs to this model",
        )
    pad = tokenizer.pad_token_id
    if pad is not None and not 0 <= pad < rows:
        raise ModelError(
            f"model {name!r}: pad id {pad} is outside its {rows} rows", "padding is looked up", "fix pad_token"
        )


def _ids(name: str, value: Any) -> list[int]:
    """One id or several, as configs have them; anything else is refused."""
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(type(each) is not int for each in ids):
        raise ModelError(
            f"model {name!r}: eos_token_id is {str(value)[:80]!r}", "an end token has a number", "fix config.json"
        )
    return ids
