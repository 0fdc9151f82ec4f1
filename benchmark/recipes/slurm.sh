#!/usr/bin/env bash
#SBATCH --job-name=rlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
# One run on several nodes under SLURM, with one launcher on each node. Submit it from this repository's folder, on a file system that
# all nodes share:
#
#     sbatch benchmark/recipes/slurm.sh train_ppo NAME FLAGS...
#     CONFIG=benchmark/recipes/accelerate/fsdp2.yaml sbatch --nodes 4 benchmark/recipes/slurm.sh train_ppo NAME FLAGS...
#
# Ten minutes before the time limit (USR1) the run writes a checkpoint and ends, and the job goes back into the queue. Where runs/NAME
# exists, the job goes on with it: after a node has died, submit the same line again. We have no SLURM: tests/slow/test_nodes.py runs
# this with stand-ins for its commands.
set -euo pipefail
script=$1 name=$2
shift 2
[[ ! -e runs/$name ]] || set -- "$@" --resume
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# On SIGTERM a launcher gives its processes this many seconds to end the update and write a checkpoint, and not 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540

stop() {
    stopped=1
    kill -TERM "$step" || true # srun sends it on to all launchers.
}
stopped=
trap stop USR1
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' launch \
    --config_file "${CONFIG:-benchmark/recipes/accelerate/multi_node.yaml}" \
    --num_machines "$SLURM_JOB_NUM_NODES" --num_processes $((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE)) \
    --main_process_ip "$head" --main_process_port $((20000 + SLURM_JOB_ID % 10000)) \
    "rlhf_details/$script.py" --run_name "$name" "$@" &
step=$!
code=0
wait "$step" || code=$? # USR1 ends this wait as well.
if [[ -n $stopped ]]; then
    wait "$step" || scontrol requeue "$SLURM_JOB_ID"
    exit
fi
exit "$code"
