# What keeps jobs alive: functions for run.slurm, and for the tasks that it starts. Nobody has to read them.
# A function that other examples of the repository have, too, has the same text there, unless a comment says why not.
set -eo pipefail
ulimit -Sn "$(ulimit -Hn)"       # open files: of hundreds of processes the first has a connection to each
export TORCH_GLOO_LAZY_INIT=1    # two processes connect when they have something to say to each other, PyTorch 2.15

fail() {                         # end with one line that says what is wrong
    echo "run.slurm: error: $1" >&2
    exit 2
}

prepare() {                      # find the environment, which must have the module $1, and the output folder
    PATH="$(realpath -m "$VENV")/bin:$PATH:/usr/sbin:/sbin"
    [[ "$IMAGE" || -x "$VENV/bin/python" ]] ||
        fail "there is no $(realpath -m "$VENV")/bin/python: install as README.md says, or set VENV"
    export IMAGE PYTHONUNBUFFERED=1 SLURM_EXPORT_ENV=ALL  # ALL: srun passes the environment on, at any site
    unset PYTHONHOME PYTHONSAFEPATH  # of another Python; with the second, train.py would not find what is beside it
    local find="import os, site; from importlib.util import find_spec; find_spec('$1') or exit('it has no $1')
others = (*filter(None, os.environ.get('PYTHONPATH', '').split(':')), site.getusersitepackages())
found = [getattr(find_spec(name), 'origin', None) or '' for name in ('$1', 'torch', 'numpy')]
print(*{path for path in found if path.startswith(tuple(other + '/' for other in others))}, sep='\n')"
    found="$(in_image python -c "$find" 2>&1)" ||
        fail "${IMAGE:-$VENV} cannot run train.py (${found##*$'\n'}): see container.def or README.md"
    found="$(grep "^/" <<<"$found" | paste -sd " ")" || true
    [[ -z "$found" ]] || echo "run.slurm: by PYTHONPATH or from your home, not from ${IMAGE:-$VENV}, come: $found"
    [[ "${SLURM_CPUS_PER_TASK:-}" ]] || fail "ask for cores with #SBATCH --cpus-per-task, not with --cpus-per-gpu"
    [[ -z "${SLURM_GPUS:-}" || "$SLURM_JOB_NUM_NODES" -eq 1 ]] ||
        fail "ask for GPUs with #SBATCH --gpus-per-node: --gpus may differ between nodes"
    IFS=, read -ra list <<<"${SLURM_JOB_GPUS:-}"  # SLURM before 21.08 has this list only, not the number
    export gpus="${SLURM_GPUS_ON_NODE:-${#list[@]}}"
    export SLURM_GPUS_ON_NODE="$gpus"
    trap show_stacks USR2        # scancel --signal=USR2 --batch JOBID
    job="$SLURM_JOB_ID"
    [[ -z "${SLURM_ARRAY_JOB_ID:-}" ]] || job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"  # not the whole array
    export output="${OUTPUT_DIR:-output/$job}"  # to continue job 1234: OUTPUT_DIR=output/1234 sbatch run.slurm
    claim_folder
    keep_program                 # in $code
}

in_image() (                     # become the command $@, in the image if there is one
    [[ "$IMAGE" ]] || exec "$@"
    options=(--quiet exec --pwd "$(realpath .)")
    [[ "${SLURM_GPUS_ON_NODE:-0}" -eq 0 ]] || options+=(--nv)  # --rocm for GPUs of AMD
    for path in . data ${STOP_FILE:+"${STOP_FILE%/*}"} "${@#*=}"; do  # what it sees: this folder, paths for train.py
        [[ -e "$path" ]] || continue
        real="$(realpath "$path")"
        options+=(--bind "$real" --bind "$real:$(realpath -s "$path")")
    done
    exec "$(type -P apptainer || type -P singularity || echo apptainer)" "${options[@]}" "$IMAGE" "$@"
)

one_task_per_node() {            # refuse other numbers; without one, srun starts so many
    export SLURM_NTASKS="${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES}"
    [[ "$SLURM_NTASKS" -eq "$SLURM_JOB_NUM_NODES" ]] ||
        fail "$SLURM_NTASKS tasks on $SLURM_JOB_NUM_NODES nodes: set #SBATCH --ntasks-per-node=1"
}

own_address() {                  # print this node's own address on the way to the host $1
    ip -4 route get "$(getent ahostsv4 "$1" | sed -n '1s/ .*//p')" | sed -n 's/.* src \([^ ]*\).*/\1/p'
}

meet_at_this_node() {            # by its address on the way to the second: its name may resolve to 127.0.1.1
    export MASTER_ADDR=127.0.0.1 MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"  # below the ephemeral ports
    [[ "$SLURM_JOB_NUM_NODES" -gt 1 ]] || return 0
    second="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)"
    address="$(scontrol show node --oneliner "$second" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')" || address="$second"
    MASTER_ADDR="$(own_address "$address")" || fail "this node finds no IPv4 route to $second: ask your site's support"
}

choose_interface() {             # Gloo would look its host's name up, which may fail
    address="$(own_address "$MASTER_ADDR")"
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$(ip -4 -o address show to "$address" | awk '{ print $2 }')}"
    for name in ${GLOO_SOCKET_IFNAME//,/ }; do
        [[ "$(ip -o address show "$name" 2>/dev/null)" ]] || fail "GLOO_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME: $(uname -n) \
has no interface $name with an address; it has: $(ip -o address | awk '{ print $2 }' | sort -u | paste -sd ' ')"
    done
}

log_usage() {                    # until the job ends: what GPUs and processors of this node say, for jupyter/usage.py
    [[ "${LOG_EVERY:=10}" != 0 && "${SLURM_LOCALID:-0}" -eq 0 ]] || return 0
    (trap "" USR1 USR2 TERM      # it ends at once if none says anything; lines with another beginning are errors
    while said="$(ask_devices | grep '^[0-9cd]')"; [[ "${first:=$said}" ]]; do
        date "+%n%s.%2N $SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}%n${said//%/%%}" >>"$output/usage-$(uname -n).txt"
        sleep "$LOG_EVERY"
    done) </dev/null &>/dev/null &
}

ask_devices() {                  # GPUs of NVIDIA, else AMD, and the energy of processors, where users may read that
    [[ "${SLURM_GPUS_ON_NODE:-0}" -eq 0 ]] || for why in event throttle; do  # the second: drivers before 535
        timeout -s 9 30 nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --format=csv,noheader,nounits \
            --query-gpu="index,utilization.gpu,memory.used,power.draw,clocks.sm,clocks_${why}_reasons.active" && break
    done || timeout -s 9 30 rocm-smi --showuse --showmeminfo vram --showpower --showclocks --csv
    for zone in /sys/class/powercap/intel-rapl:*/; do paste -d, "$zone"{energy_uj,max_energy_range_uj,name}; done
}

show_stacks() {                  # have all Python processes of the job print their stacks; SLURM 20.11 and newer
    signalled=yes
    srun --overlap --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" bash -c 'source ./plumbing.sh; ask_for_stacks' &
}

ask_for_stacks() {               # on each node: by USR2, which would end a process that does not listen to it
    for process in /proc/[0-9]*; do
        [[ "$(readlink "$process/exe")" == */python* ]] && grep -qzx "SLURM_JOB_ID=$SLURM_JOB_ID" "$process/environ" &&
            caught="$(sed -n 's/^SigCgt:[[:space:]]*//p' "$process/status")" && (((16#$caught >> 11) % 2)) &&
            kill -USR2 "${process##*/}" && sleep 0.1  # not at once: a loader's worker writes where its parent does
    done 2>/dev/null || true
}

wait_for() {                     # leave the exit status of process $1 in $status
    signalled=yes
    while [[ "$signalled" ]]; do # a signal ends `wait` early: its trap says so, then wait again
        signalled=""
        wait "$1" && status=0 || status=$?
    done
}

run() {                          # run $@, the job's step; then requeue the job if train.py was asked to stop
    "$@" &
    step=$!
    wait_for "$step"
    if [[ "$status" -eq 0 && "$output/stopped" -nt "$started" ]]; then
        requeue || status=1
    elif [[ "$status" -eq 0 && "${successor:-}" ]]; then
        scancel "$successor"     # it has finished in time after all
    fi
    [[ "$status" -eq 0 ]] ||
        echo "run.slurm: error: the job failed, see above. Fix the cause, then: OUTPUT_DIR=$output sbatch run.slurm" >&2
    exit "$status"
}

until_asked_to_stop() {          # run $@ in a task; signals of SLURM reach the task alone: it tells train.py by a file
    STOP_FILE="$(mktemp -d 2>/dev/null || mktemp -d -p /tmp)/stop"  # TMPDIR may be there on the first node only
    export STOP_FILE PET_SIGNALS_TO_HANDLE=SIGINT
    trap 'touch "$STOP_FILE"; signalled=yes' USR1 TERM
    (trap "" USR1 TERM; "$@") &
    wait_for "$!"
    rm -r "${STOP_FILE%/*}"
    exit "$status"
}

stop_near_time_limit() {         # have each task tell train.py, which saves and ends
    trap "" USR1                 # once is enough
    signalled=yes
    until near_end; do
        # They do not listen while they start, nor in a long save or evaluation: tell them again.
        [[ "${step:-}" ]] && ! kill -USR1 "$step" 2>/dev/null && return 0
        sleep 5
    done
    requeue || true
}

source ./requeue.sh              # keep_program, requeue, saved
