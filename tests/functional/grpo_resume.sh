#!/usr/bin/env bash
# Two steps, then two more of the same run: no step is lost or made twice, and the sampler follows across the border.
#   bash tests/functional/grpo_resume.sh [KEY=VALUE ...]    a run keeps its words when it goes on
source "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

train output_dir="$run" max_steps=2 tasks_per_step=4 eval_tasks=8 eval_on_start=false 'report_to=["tensorboard"]' "$@"
train --resume "$run" max_steps=4

judge \
    'count(data["train/loss"]) == 4' \
    'steps(data["train/loss"]) == set(range(1, 5))' \
    'max(data["train/sampling/sampling_logp_difference/max"], 3, 0) < 1e-4' \
    'finite(data["train/grad_norm"]) and min(data["train/grad_norm"]) > 0'
