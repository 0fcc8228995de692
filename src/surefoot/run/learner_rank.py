"""The process of one further rank of the learner: loads the model, meets the others, follows rank 0.

Promises   ends when the driver does, by SIGKILL too; what it prints goes to its log; an error of ours arrives at the
           driver with its type, what, why and fix.
Never      samples, saves or decides anything by itself.

Read next: `runtime/learner_ranks.py`, who leads.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from surefoot.errors import ConfigError, SurefootError
from surefoot.system.process import die_with_parent


def refuse_launcher(environ: Mapping[str, str]) -> None:
    """Raise where a launcher starts the same command many times: each of them would be a run of its own."""
    size = environ.get("WORLD_SIZE", "1")
    if "LOCAL_RANK" in environ and size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"this is one of {size} processes of a launcher (WORLD_SIZE, LOCAL_RANK)",
            "each would sample, train and save a run of its own; surefoot starts the ranks of its learner itself",
            f"start it once, without torchrun or accelerate launch, with runtime.learner_ranks={size}",
        )


def main() -> int:
    """Follow until rank 0 leaves."""
    die_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer

    def say(told: Any) -> None:
        answers.write(json.dumps(told).encode() + b"\n")

    try:
        _follow(sys.stdin.buffer, say)
    except SurefootError as error:
        traceback.print_exc()
        say({"error": [type(error).__name__, error.what, error.why, error.fix]})
        return 1
    except Exception:  # noqa: BLE001 - the driver names it; the log has it
        traceback.print_exc()
        say({"error": [None]})
        return 1
    return 0


def _follow(questions: IO[bytes], say: Any) -> None:
    from surefoot.config import Config
    from surefoot.learner.model import load_policy, resolve_device
    from surefoot.learner.sharding import RankGroup
    from surefoot.run.model import codec_of, lora_settings, make_learner, set_determinism
    from surefoot.runtime.learner_ranks import RankStart, follow, join

    start = RankStart(**json.loads(questions.readline()))
    print(f"rank {start.index} of {start.size} begins as process {os.getpid()}", file=sys.stderr, flush=True)
    config, base = Config.model_validate_json(start.config), Path(start.base)
    set_determinism(config)
    device = resolve_device(config.device)
    if device == "cuda":
        import torch

        torch.cuda.set_device(start.index)
    policy = load_policy(config.model, base=base, device=device, dtype=config.dtype, lora=lora_settings(config))
    codec = codec_of(config, base, policy)
    say({"made": "loaded"})
    if not questions.readline():
        return
    join(start.index, start.size, start.store, start.deadline_s, device)
    ranks = RankGroup(next(policy.model.parameters()).device)
    learner = make_learner(config, base, policy, codec, (), ranks)  # tasks are rank 0's
    del policy  # whole weights that were cut
    say({"made": "joined"})
    follow(learner, questions, say)


if __name__ == "__main__":
    sys.exit(main())
