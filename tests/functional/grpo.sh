#!/usr/bin/env bash
# The built-in run, three steps of 4 tasks x 8 answers: it learns something, with the sampler that it thinks it has.
#   bash tests/functional/grpo.sh [KEY=VALUE ...]
source "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

train output_dir="$run" max_steps=3 tasks_per_step=4 eval_tasks=8 eval_on_start=false 'report_to=["tensorboard"]' "$@"

judge \
    'count(data["train/loss"]) == 3' \
    'finite(data["train/grad_norm"]) and min(data["train/grad_norm"]) > 0' \
    'max(data["train/sampling/sampling_logp_difference/max"]) < 1e-4' \
    'min(data["train/token_mult_prob_error"]) >= 1 and max(data["train/token_mult_prob_error"]) < 1.001' \
    'max(data["train/steps_refused"]) == 0' \
    '0 <= min(data["train/reward"]) and max(data["train/reward"]) <= 1'
