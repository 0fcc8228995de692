"""A run's adapter out of its checkpoint: as it is, or merged into its model as a plain Hugging Face folder.

Promises   merged, the weights are those that engines were handed at that step; the base is checked to be the run's own
           first; the folder is there whole or not at all, and nothing that exists is overwritten.
Never      writes into the run folder.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from surefoot.config import Config
from surefoot.errors import ConfigError, StateError
from surefoot.run.evaluate import TRAINING_ONLY, find_checkpoint
from surefoot.run.store import load_run_config
from surefoot.storage.files import MANIFEST, Manifest, ManifestEntry, commit_folder, verify_folder
from surefoot.storage.run_folder import RunFolder
from surefoot.system.files import storage_error


@dataclass(frozen=True)
class Exported:
    """What was written, and where."""

    folder: Path
    checkpoint: Path
    merged: bool
    quantised: bool = False
    """Whether the base is what came back from four bits, and not the model's file."""

    def lines(self) -> list[str]:
        """For a person."""
        if self.merged:
            base = "the model as four bits gave it back, which is not its file," if self.quantised else "the model"
            what = f"a plain Hugging Face folder: {base} with the adapter merged in"
            return [
                f"{self.folder}  ({what}, from {self.checkpoint})",
                f"next  surefoot eval {self.folder} --tasks FILE",
            ]
        return [f"{self.folder}  (an adapter in PEFT's form, from {self.checkpoint})"]


def export(run: Path, out: Path, *, checkpoint: str | None = None, merged: bool = False) -> Exported:
    """Write the adapter of a run into a folder of its own.

    Args:
        checkpoint: "step_150", or "best"; the newest when left out.
        merged: write the whole model, with the adapter's product added to its weights.
    """
    folder = RunFolder.open(run)
    loaded = load_run_config(folder)
    saved = find_checkpoint(folder, checkpoint)
    if loaded.config.lora.rank is None:
        raise ConfigError(
            f"{run} trained every weight: it has no adapter", "its checkpoints are plain Hugging Face folders already",
            f"use {saved} as it is, or copy it",
        )  # fmt: skip
    final = out.absolute()
    if final.exists() or final.is_symlink():
        raise StateError(f"{out} exists already", "nothing is overwritten", "name a folder that is not there")
    manifest = verify_folder(saved, unread=TRAINING_ONLY)
    temporary = final.with_name(f".{final.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700, parents=True)
        known = _write_merged(loaded.config, loaded.base, saved, temporary) if merged else {}
        _copy(manifest, temporary, whole=not merged)
        facts = {"step": manifest.facts.get("step"), "merged": merged}
        facts |= {"quantization": loaded.config.quantization} if merged else {"adapter": manifest.facts.get("adapter")}
        commit_folder(temporary, final, facts, known=known)
    except OSError as error:
        raise storage_error(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(out, saved, merged, quantised=merged and loaded.config.quantization != "none")


def _copy(manifest: Manifest, folder: Path, *, whole: bool) -> None:
    """The tokenizer's files and, with `whole`, the adapter's; training state belongs to the run."""
    for name in manifest.files:
        if name.startswith(TRAINING_ONLY) or name == MANIFEST or (name.startswith("adapter_") and not whole):
            continue
        shutil.copyfile(manifest.path(name), folder / name)


def _write_merged(config: Config, base: Path, saved: Path, folder: Path) -> dict[str, ManifestEntry]:
    """The model's own files, and its weights with the adapter in them."""
    from surefoot.learner.checkpoint import WEIGHTS, weights_of
    from surefoot.learner.lora import with_adapter
    from surefoot.learner.model import load_policy
    from surefoot.learner.tensor_file import write_tensors
    from surefoot.run.model import adapter_plan, lora_settings

    adapter_plan(config, base, saved)  # another model is refused before its weights are read
    lora = lora_settings(config)
    policy = load_policy(config.model, base=base, device="cpu", dtype=config.dtype, lora=lora)
    policy.model.save_pretrained(folder, state_dict={})
    weights = weights_of(policy.model)
    _, adapter = with_adapter(policy, lora)
    assert adapter is not None, "the run has one"
    adapter.load(saved)
    published = adapter.published(0)
    return {WEIGHTS: write_tensors(folder / WEIGHTS, weights | dict(published))}
