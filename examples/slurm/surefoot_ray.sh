#!/usr/bin/env bash
# One surefoot run on several nodes of a Slurm cluster:
#
#   sbatch examples/slurm/surefoot_ray.sh run.toml /shared/runs/my-run
#
# run.toml has [runtime] kind = "ray"; the address is given below. The run folder lies on a disk that all nodes see.
# A job that Slurm ends early (time limit, preemption) saves and exits with 75: submit the same line again, it goes on.

#SBATCH --job-name=surefoot
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --open-mode=append

set -euo pipefail

if [ "$#" -ne 2 ]; then
    echo "usage: sbatch $0 CONFIG RUN_FOLDER" >&2
    exit 2
fi
config=$1
run=$2
port=${SUREFOOT_RAY_PORT:-6379}
cpus=${SLURM_CPUS_ON_NODE:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}

# The token is this job's own. Ray listens on every interface: without it, whoever reaches the port could run code here.
# It travels in the environment, never on a command line, which every user of the node can read.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0

# This script runs on the first node of the job; it becomes the head.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_ip=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
echo "head ${nodes[0]} ($head_ip:$port), ${#nodes[@]} nodes, $gpus GPUs each"

ray start --head --port="$port" --num-cpus="$cpus" --num-gpus="$gpus" \
    --include-dashboard=false --disable-usage-stats --block &
if [ "${#nodes[@]}" -gt 1 ]; then
    srun --nodes=$((${#nodes[@]} - 1)) --ntasks-per-node=1 --exclude="${nodes[0]}" --kill-on-bad-exit=0 \
        ray start --address="$head_ip:$port" --num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats --block &
fi

# A run is refused when the cluster cannot hold it, so every node has to be there first.
python - "127.0.0.1:$port" "${#nodes[@]}" <<'END'
import sys
import time

import ray

address, wanted = sys.argv[1], int(sys.argv[2])
for _ in range(90):
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        there = sum(node["Alive"] for node in ray.nodes())
        if there >= wanted:
            sys.exit(0)
        print(f"{there} of {wanted} nodes are there", flush=True)
    except ConnectionError:
        print("the head is not there yet", flush=True)
    time.sleep(2)
sys.exit(f"after three minutes not all of {wanted} nodes had joined {address}")
END

# The driver is on the head node, so 127.0.0.1 leads to it: the run folder's config holds wherever the next job lands.
if [ -f "$run/config.toml" ]; then
    surefoot train --resume "$run" &
else
    surefoot train "$config" "output_dir=$run" "runtime.address=127.0.0.1:$port" &
fi
driver=$!
trap 'kill -TERM "$driver" 2>/dev/null || true' TERM INT
echo "the driver is process $driver; look with: surefoot status $run"

# A signal ends `wait` early; the driver is saving then, so it is waited for again. Its exit code is the job's.
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do
    code=0
    wait "$driver" || code=$?
done
echo "surefoot exited with $code"
exit "$code"
