# What run.slurm needs besides its own lines: checks before the start, a stop in time, the requeue.
# run.slurm sources this file, and so does each task that srun starts.
set -eo pipefail
export SLURM_TIME_FORMAT=%s SLURM_EXPORT_ENV=ALL SLURM_OVERLAP=1 PYTHONUNBUFFERED=1  # %s: seconds

fail() {                         # end with one line that says what is wrong, and status $2 or 2
    echo "run.slurm: error: $1" >&2
    exit "${2:-2}"
}

told() {                         # print a value from SLURM, such as `told JobState job "$job"`
    scontrol show "$2" "$3" | sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" | head -n 1
}

# Tasks, and the copy of this file that a requeued job sources, have these variables already.
if [[ ! "${BASH_SOURCE[0]}" -ef "${code:-}/job.sh" ]]; then
    # Refuse login nodes, and steps without a terminal: `srun bash run.slurm` would hang.
    [[ "${SLURMD_NODENAME:-}" && (-v SLURM_PTY_PORT || ! -v SLURM_STEP_ID ||
        ! "$(told State step "$SLURM_JOB_ID.$SLURM_STEP_ID")") ]] ||
        fail "submit it from its folder: sbatch run.slurm"
    shown="$(scontrol show job "$SLURM_JOB_ID")" || true
    # In an array, `job` is one array task. SLURM_ARRAY_* can come from the submitting shell.
    [[ ! "$shown" || "$shown" == *" ArrayJobId="* ]] || unset "${!SLURM_ARRAY_@}"
    job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_JOB_ID:+_$SLURM_ARRAY_TASK_ID}"
    output="${OUTPUT_DIR:-output/$job}" before=""
    for word in "$@"; do         # sbatch run.slurm --output-dir output/1234 continues job 1234
        [[ "$before" != --out?(put)?(-d*([a-z])) ]] || output="$word"  # also the short --output
        [[ "$word" != --out?(put)?(-d*([a-z]))=* ]] || output="${word#*=}"
        before="$word"
    done
    # code: the copy of the program; stop_file: train.py saves and ends when this file exists.
    export output code="$output/code-$job" stop_file="$output/stop"
    if [[ -e "$code/job.sh" ]]; then  # a requeued job runs the program that was submitted
        # shellcheck source=/dev/null
        source "$code/job.sh"
        return
    fi
fi
trap 'echo SLURM >>"$stop_file"' USR1 TERM  # in a task; in the job, `prepare` sets another one

# Check the environment, which must have the Python modules $@, and copy the program.
prepare() {
    mkdir -p "$output"
    rm -f "$stop_file" "$output"/{stopped,finished}
    trap stop_in_time USR1 TERM  # USR1: near the time limit; TERM: at a preemption
    # Unset variables of an outer job (GPUs: if this one asked for none), and a site's defaults.
    unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_@}" SLURM_TIMELIMIT SLURM_GRES SRUN_EXPORT_ENV
    [[ ! "$shown" || "$shown" =~ TresPer[A-Za-z]+=[^[:space:]]*gpu ]] ||
        unset "${!SLURM_GPUS@}" SLURM_TRES_PER_TASK
    unset PYTHONHOME PYTHONSAFEPATH OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY
    ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"  # files: a socket per process
    [[ "$shown" != *HetJobId=* ]] || fail "a heterogeneous job is not supported: use one component"
    [[ "${SLURM_CPUS_PER_TASK:-}" ]] || fail "ask for cores with #SBATCH --cpus-per-task"
    python="$(realpath -ms "$VENV")/bin/python" leads="$(realpath -m "$VENV/bin/python")"
    [[ "$leads" == "$python" ]] || leads="$python, which is a link to $leads"
    [[ "$IMAGE" || -x "$python" ]] || fail "$(uname -n) has no $leads: see README.md, or set VENV"
    export IMAGE COMMIT PATH="${python%/*}:$PATH:/usr/sbin:/sbin"
    local why find="import importlib.util as u, sys
for name in sys.argv[1:]: u.find_spec(name) or sys.exit(f'it has no {name}')"
    why="$(in_image python -c "$find" "$@" 2>&1)" ||
        fail "${IMAGE:-$VENV} cannot run train.py (${why##*$'\n'}): see README.md"
    [[ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 || (! -e /dev/nvidia0 && ! -e /dev/kfd) ]] ||
        echo "run.slurm: this node has GPUs and the job uses none: see --gpus-per-node in run.slurm"
    touch "$output/started-$job"
    [[ -d "$code" ]] || copy_program
    COMMIT="$(cat "$code/.commit")"
}

# Copy scripts, settings and packages to $code: a requeued job runs them as they were.
copy_program() {
    mkdir -p "$code.part"
    find . -maxdepth 2 -not -path '*/.*' -xtype f -regextype posix-extended \
        -regex '.*\.(py|sh|json|ya?ml|toml)' -exec cp --parents {} "$code.part" \;
    for package in */__init__.py; do
        [[ ! -e "$package" ]] || cp -rH "${package%/*}" "$code.part"
    done
    git rev-parse HEAD >"$code.part/.commit" 2>/dev/null || true
    mv "$code.part" "$code"
}

# Replace this subshell with the command $@, in the Apptainer image if there is one.
in_image() (
    [[ "$IMAGE" ]] || exec "$@"
    flags=(--quiet exec --pwd "$PWD")
    [[ ! -e /dev/nvidiactl ]] || flags+=(--nv)
    [[ ! -e /dev/kfd ]] || flags+=(--rocm)
    for path in "$PWD" data "$output" "${@#*=}"; do  # paths that the image needs
        [[ ! -e "$path" ]] || flags+=(--bind "$(realpath -s "$path")")
    done
    exec "$(type -P apptainer || type -P singularity)" "${flags[@]}" "$IMAGE" "$@"
)

# Print this node's address on the way to host $1; this node's name may resolve to 127.0.1.1.
own_address() {
    ip -4 route get "$(getent ahostsv4 "$1" | awk '{ print $1; exit }')" 2>/dev/null |
        sed -n 's/.* src \([^ ]*\).*/\1/p' || true
}

# Set where the processes meet: this node, which is the first one, and a port of this job.
meet_at_this_node() {
    export MASTER_ADDR=127.0.0.1 MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"
    [[ "$SLURM_JOB_NUM_NODES" -gt 1 ]] || return 0
    second="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)"
    MASTER_ADDR="$(own_address "$(told NodeAddr node "$second" || echo "$second")")"
    [[ "$MASTER_ADDR" ]] || MASTER_ADDR="$(hostname)"  # without the program `ip`
}

# In a task: set $address (of this node), and Gloo's network interface unless the user has set it.
choose_interface() {
    address="$(own_address "$MASTER_ADDR")"
    interface="$(ip -4 -o address show to "$address" | awk '{ print $2; exit }')" || return 0
    [[ ! "$interface" ]] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
}

# In a task: set OMP_NUM_THREADS, and $processes: the node's number of GPUs, or $1 without GPUs.
share_node() {
    processes="$((${SLURM_GPUS_ON_NODE:-0} > 0 ? SLURM_GPUS_ON_NODE : $1))"
    threads="$((SLURM_CPUS_PER_TASK > processes ? SLURM_CPUS_PER_TASK / processes : 1))"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
}

# Run $@, and leave its exit status in $status. Traps run meanwhile. (bash's `wait` can lose the
# status of a process that ends while a trap runs.) $@ ignores SLURM's USR1.
follow() {
    exec {out}>&1 {ended}< <(trap "" USR1; "$@" >&"$out" && echo 0 || echo "$?")
    status=""
    while [[ ! "$status" ]]; do
        read -r status <&"$ended" || [[ "$?" -gt 128 ]] || status=137  # killed: it printed nothing
    done
}

# In a task: run $@. The trap on USR1 and TERM makes the file that stops train.py.
until_asked_to_stop() {
    follow "$@"
    exit "$status"
}

# Run $@, the job's step; requeue the job if SLURM has stopped train.py; end with the step's status.
run() {
    follow "$@"
    if [[ "$status" -eq 0 && -s "$output/stopped" ]]; then  # it is empty if a user made `stop`
        requeue
    elif [[ "$status" -ne 0 ]] && still_running; then
        advice="Correct the cause, then: sbatch run.slurm --output-dir $output"
        fail "the job failed, see above. $advice" "$status"
    fi
    exit "$status"
}

# Ask train.py to save and end. If it has not ended 20 s before the limit, requeue the job.
stop_in_time() {
    trap "" USR1 TERM            # the first signal is enough
    echo SLURM >>"$stop_file"
    (
        # Signal the tasks: on NFS other nodes see the file late. A preemption has signalled them.
        scancel --signal=USR1 "$job" 2>/dev/null || true
        left=1
        while [[ "$left" -gt 0 ]]; do  # the limit may change or be missing, or SLURM may not answer
            ends="$(told EndTime job "$job")" || true
            left="$([[ "$ends" == [0-9]* ]] && echo "$((ends - 20 - $(date +%s)))" || echo 10)"
            sleep "$((left > 0 ? left : 0))"
        done
        requeue
    ) &
}

still_running() {                # fails if the job is cancelled, requeued or at its end
    state="$(told JobState job "$job")" || true
    [[ "${state:-RUNNING}" == RUNNING ]]  # SLURM may not answer for a moment
}

# Requeue the job, unless it was cancelled, or has saved nothing (it would repeat for ever).
requeue() {
    still_running || return 0
    [[ "$(find "$output/" -maxdepth 1 -name 'checkpoint*' -newer "$output/started-$job")" ]] ||
        fail "no new checkpoint, so the job is not requeued: raise --time"
    echo "run.slurm: requeueing job $job"
    scontrol requeue "$job" || fail "to continue: sbatch run.slurm --output-dir $output"
}
