#!/bin/bash
# Train on a cluster with Slurm: one task a GPU, put in the queue again until training is done.
#   sbatch configs/launch/slurm.sh configs/drivaer.yaml [--key value ...]
# Other sizes: sbatch --nodes 16 --ntasks-per-node 4 --gpus-per-node 4 configs/launch/slurm.sh ...
#SBATCH --job-name=globe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=globe-%j.log
set -u
config=${1:?give a configuration: sbatch configs/launch/slurm.sh configs/drivaer.yaml}
shift

# A task that fails is noticed by the others: they get a minute to say so before they are killed.
srun --kill-on-bad-exit=0 --wait=60 globe fit \
  --config "$config" --config configs/launch/multi_node.yaml \
  --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" \
  --ckpt_path last "$@"
code=$?

# 75: stopped by the time limit or its signal, with last.ckpt written.
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
