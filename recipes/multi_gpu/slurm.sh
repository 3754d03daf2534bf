#!/usr/bin/env bash
# WMT'14 English-German on the nodes of a SLURM job, submitted from the folder of this repository:
#
#   sbatch --nodes 4 recipes/multi_gpu/slurm.sh OUTPUT [options of wmt14_en_de/run.sh]
#
#SBATCH --job-name=lsq
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
set -euo pipefail
recipe=recipes/wmt14_en_de/run.sh
[ -x $recipe ] || { echo "slurm.sh: there is no $recipe here; submit from the folder of this repository" >&2; exit 2; }
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# One torchrun on each node. SLURM copies this script elsewhere, so that it cannot name its neighbours by its own place.
srun --ntasks-per-node 1 --cpus-per-task "$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 \
    bash -c 'exec "$0" --machine "$SLURM_NODEID" "$@"' $recipe --mode float --processes "$SLURM_GPUS_ON_NODE" \
    --machines "$SLURM_JOB_NUM_NODES" --master "$master:$((29500 + SLURM_JOB_ID % 1000))" --name "$SLURM_JOB_ID" "$@"
