#!/usr/bin/env bash
# Two machines of eight GPUs under Slurm: sbatch examples/two_nodes.sh
# Without Slurm, on each machine: NODES=2 HEAD=<first machine> bash examples/two_nodes.sh
#SBATCH --job-name=onetrip
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
set -euo pipefail

nodes=${SLURM_JOB_NUM_NODES:-${NODES:-1}}
processes=${SLURM_GPUS_ON_NODE:-${PROCESSES:-2}}
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
else
  head=${HEAD:-localhost}
fi
script=${SCRIPT:-${SLURM_SUBMIT_DIR:-$PWD}/examples/ddp_fsdp2.py}

# One torchrun a machine; they meet at the first one.
launch=(
  torchrun --nnodes "$nodes" --nproc-per-node "$processes"
  --rdzv-backend c10d --rdzv-id "${SLURM_JOB_ID:-onetrip}" --rdzv-endpoint "$head:${PORT:-29500}"
  "$script" fsdp2 "$@"
)
if [[ -n ${SLURM_JOB_ID:-} ]]; then
  exec srun "${launch[@]}"
fi
exec "${launch[@]}"
