"""A model that is already in memory: it is written into the run folder, and the run starts from there.

Promises   the run does not depend on the object: it can be resumed, and its start be looked at, when the object is
           gone; an object that would not be written whole (adapters, quantised weights) is refused.
Never      trains the object itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.assemble.shapes import SAVE_BOTH
from surefoot.config_load import LoadedConfig
from surefoot.errors import ConfigError, ModelError
from surefoot.store.durable import commit_folder, storage_error
from surefoot.store.run_folder import START_MODEL, RunFolder

STANDS_IN = "object"
"""What the key `model` says until the object has a folder."""


@dataclass(frozen=True)
class ModelObject:
    """A causal language model and its tokenizer, as transformers makes them."""

    model: Any
    tokenizer: Any

    def save(self, loaded: LoadedConfig, folder: RunFolder) -> LoadedConfig:
        """Write both into the run folder; the config that names the place."""
        from surefoot.policy.load import save_object

        final = folder.root / START_MODEL
        temporary = folder.root / f".{START_MODEL}.tmp"
        try:
            temporary.mkdir(mode=0o700)
            save_object(self.model, self.tokenizer, temporary)
        except OSError as error:
            raise storage_error(final, error) from error
        commit_folder(
            temporary, final, {"given": type(self.model).__name__, "tokenizer": type(self.tokenizer).__name__}
        )
        config = loaded.config.model_copy(update={"model": str(final)})
        return loaded.with_config(config).with_note(
            f"the model object was saved in {START_MODEL}/ of the run folder and is trained from there; the object "
            "itself stays as it is"
        )


def model_of(model: Any, tokenizer: Any) -> tuple[str | None, ModelObject | None]:
    """What the key `model` says, and the object where one was given."""
    if model is None or isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"processing_class with model={str(model)!r}", "the tokenizer that lies beside the weights is used",
                f"leave it out, or put both into one folder: {SAVE_BOTH}",
            )  # fmt: skip
        return None if model is None else str(model), None
    kind = type(model).__name__
    if not callable(getattr(model, "save_pretrained", None)):
        raise ModelError(
            f"model is an object of type {kind}", "only models that transformers can save are known",
            "give a folder, a hub name, or a model of transformers with its tokenizer",
        )  # fmt: skip
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"model is a {kind} with adapters", "every weight is trained, there are no adapters",
            f"merge them first: model = model.merge_and_unload(); {SAVE_BOTH}",
        )  # fmt: skip
    if getattr(model, "is_quantized", False):
        raise ModelError(
            f"model is a {kind} with quantised weights", "weights are trained in full precision",
            "load it without quantization_config",
        )  # fmt: skip
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        name = getattr(getattr(model, "config", None), "_name_or_path", "") or "NAME"
        missing = "no tokenizer with it" if tokenizer is None else f"a {type(tokenizer).__name__} as tokenizer"
        raise ModelError(
            f"model is a {kind}, and {missing}", "a model object does not know its tokenizer",
            f"give processing_class=AutoTokenizer.from_pretrained({name!r}), or model={name!r} alone",
        )  # fmt: skip
    return STANDS_IN, ModelObject(model, tokenizer)
