#!/bin/bash
# Train on this machine over MPI, or on the nodes of an allocation, from the example's folder:
#     bash more/mpirun_local.sh [SCRIPT] [its arguments]
#     NP=4 OMP_NUM_THREADS=2 bash more/mpirun_local.sh more/train_lm.py --epochs 2
set -euo pipefail

if ! command -v mpirun >/dev/null; then
    echo "mpirun_local.sh: error: no mpirun: apt-get install openmpi-bin" >&2
    exit 1
fi
NP="${NP:-2}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(($(nproc) > NP ? $(nproc) / NP : 1))}"
script=train.py
if [[ "${1:-}" == *.py ]]; then
    script="$1"
    shift
fi
# The processes are not bound to one core each, so that threads spread. --oversubscribe permits more
# processes than cores.
exec mpirun -np "$NP" --bind-to none --oversubscribe python "$script" "$@"
