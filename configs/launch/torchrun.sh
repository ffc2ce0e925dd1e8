#!/bin/bash
# Train on machines without a scheduler: run this on each of them, with its own NODE_RANK.
#   NODE_RANK=0 MASTER_ADDR=first-machine bash configs/launch/torchrun.sh configs/drivaer.yaml [--key value ...]
# After a stop of any kind run it again on all of them: training goes on from the last checkpoint.
set -u
config=${1:?give a configuration: bash configs/launch/torchrun.sh configs/drivaer.yaml}
shift
nodes=${NODES:-2} # machines
devices=${DEVICES:-8} # GPUs of each machine

exec torchrun --nnodes "$nodes" --nproc-per-node "$devices" --node-rank "${NODE_RANK:-0}" \
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" --max-restarts 0 \
  -m globe_lightning fit \
  --config "$config" --config configs/launch/multi_node.yaml \
  --trainer.num_nodes "$nodes" --trainer.devices "$devices" \
  --ckpt_path last "$@"
