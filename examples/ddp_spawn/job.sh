# What run.slurm needs besides its own lines: checks before the start, a stop in time, the requeue.
# run.slurm sources this file, and so does each task that srun starts.
set -eo pipefail
export SLURM_TIME_FORMAT=%s      # scontrol prints times as seconds since 1970

fail() {                         # end with one line that says what is wrong
    echo "run.slurm: error: $1" >&2
    exit 2
}

told() {                         # print what SLURM says about this job now, such as `told JobState`
    scontrol show job "$job" | sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" | head -n 1
}

# A login node, even in a shell of salloc, has no SLURMD_NODENAME.
[[ "${SLURMD_NODENAME:-}" ]] || fail "submit it from its own folder: sbatch run.slurm"
# In an array the job is this task alone.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"
output="${OUTPUT_DIR:-output/$job}"
for ((i = 1; i < $#; i++)); do   # sbatch run.slurm --output-dir output/1234 continues job 1234
    [[ "${!i}" != --output-dir ]] || { next=$((i + 1)) && output="${!next}"; }
done
export code="$output/code-$job"  # the copy of the program that this job runs
export stop_file="$output/stop"  # train.py saves and ends when it is there

# A requeued job goes on with the files that it was submitted with, this one included.
if [[ -e "$code/job.sh" && ! "${BASH_SOURCE[0]}" -ef "$code/job.sh" ]]; then
    # shellcheck source=/dev/null
    source "$code/job.sh"
    return
fi

# Check the environment, which must have the Python modules $@, and copy the program.
prepare() {
    # Forget what SLURM told another job in which this one was submitted, and a site's own defaults.
    unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER@}" SLURM_TIMELIMIT SLURM_GRES SRUN_EXPORT_ENV
    [[ "$(told TresPerNode)$(told TresPerJob)$(told TresPerTask)" == *gpu* ]] ||
        unset "${!SLURM_GPUS_PER@}" SLURM_GPUS SLURM_TRES_PER_TASK
    export SLURM_EXPORT_ENV=ALL PYTHONUNBUFFERED=1
    unset PYTHONHOME PYTHONSAFEPATH OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY
    files="$(ulimit -Hn)"        # open files: rank 0 has a connection to each other rank
    ulimit -Sn "$([[ "$files" == unlimited || "$files" -gt 65536 ]] && echo 65536 || echo "$files")"
    [[ ! "${SLURM_HET_SIZE:-}" ]] || fail "a heterogeneous job is not supported: use one component"
    [[ "${SLURM_CPUS_PER_TASK:-}" ]] || fail "ask for cores with #SBATCH --cpus-per-task"
    python="$(realpath -m "$VENV")/bin/python"
    [[ "$IMAGE" || -x "$python" ]] ||
        fail "there is no $(realpath -m "$python") on $(uname -n): see README.md, or set VENV"
    export IMAGE PATH="${python%/*}:$PATH:/usr/sbin:/sbin"
    local find="import importlib.util as u, sys
for name in sys.argv[1:]: u.find_spec(name) or sys.exit(f'it has no {name}')"
    in_image python -c "$find" "$@" || fail "${IMAGE:-$VENV} cannot run train.py, see above"
    if [[ "${SLURM_GPUS_ON_NODE:-0}" -eq 0 && (-e /dev/nvidia0 || -e /dev/kfd) ]]; then
        echo "run.slurm: this node has GPUs and the job uses none: see --gpus-per-node in run.slurm"
    fi
    mkdir -p "$output"
    rm -f "$stop_file" "$output"/{stopped,finished}
    touch "$output/started-$job"
    [[ -d "$code" ]] || copy_program
    COMMIT="$(cat "$code/.commit")"
    export COMMIT
}

# Copy scripts, settings and packages (folders with __init__.py) to $code: a requeued job runs them
# as they were, whatever is edited meanwhile.
copy_program() {
    rm -rf "$code.part"
    mkdir "$code.part"
    find . -maxdepth 1 -type f -regextype posix-extended -regex '.*\.(py|sh|json|ya?ml|toml)' \
        -exec cp -p {} "$code.part" \;
    for package in */__init__.py; do
        [[ ! -e "$package" ]] || cp -rp "${package%/*}" "$code.part"
    done
    git rev-parse HEAD >"$code.part/.commit" 2>/dev/null || true
    mv "$code.part" "$code"
}

# Become the command $@, in the Apptainer image if there is one.
in_image() (
    [[ "$IMAGE" ]] || exec "$@"
    flags=(--quiet exec --pwd "$PWD")
    [[ ! -e /dev/nvidiactl ]] || flags+=(--nv)
    [[ ! -e /dev/kfd ]] || flags+=(--rocm)
    for path in "$PWD" data "$output" "${@#*=}"; do  # what the image has to see
        [[ ! -e "$path" ]] || flags+=(--bind "$(realpath -s "$path")")
    done
    exec "$(type -P apptainer || type -P singularity)" "${flags[@]}" "$IMAGE" "$@"
)

# Print this node's address on the way to the host $1: its own name may resolve to 127.0.1.1.
own_address() {
    ip -4 route get "$(getent ahostsv4 "$1" | awk '{ print $1; exit }')" 2>/dev/null |
        sed -n 's/.* src \([^ ]*\).*/\1/p' || true
}

# Set where the processes meet: this node, which is the first one, and a port of this job.
meet_at_this_node() {
    export MASTER_ADDR=127.0.0.1 MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"
    [[ "$SLURM_JOB_NUM_NODES" -gt 1 ]] || return 0
    MASTER_ADDR="$(own_address "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)")"
    [[ "$MASTER_ADDR" ]] || MASTER_ADDR="$(hostname)"  # there is no program `ip`
}

# In a task: set address, this node's own, and the network interface of Gloo, if it is not set.
choose_interface() {
    address="$(own_address "$MASTER_ADDR")"
    interface="$(ip -4 -o address show to "$address" | awk '{ print $2; exit }')" || return 0
    [[ ! "$interface" ]] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
}

# In a task: set processes to the number of GPUs that it has, or $1 without GPUs, and the threads of
# each process, unless OMP_NUM_THREADS is set.
share_node() {
    processes="$((${SLURM_GPUS_ON_NODE:-0} > 0 ? SLURM_GPUS_ON_NODE : $1))"
    threads="$((SLURM_CPUS_PER_TASK > processes ? SLURM_CPUS_PER_TASK / processes : 1))"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
}

# Wait for process $1, and leave its exit status in $status. A signal ends `wait` early; then its
# trap has set heard, and this waits again.
wait_for() {
    heard=yes
    while [[ "$heard" ]]; do
        heard=""
        wait "$1" && status=0 || status=$?
    done
}

# In a task: run $@. SLURM's signals do not reach it: they make the file that stops train.py.
until_asked_to_stop() {
    trap 'heard=yes; echo SLURM >"$stop_file"' USR1 TERM
    (trap "" USR1 TERM; "$@") &
    wait_for "$!"
    exit "$status"
}

# Run $@, the job's step; requeue the job if SLURM has stopped train.py; end with the step's status.
run() {
    "$@" &
    trap 'heard=yes; stop_in_time' USR1 TERM
    wait_for "$!"
    if [[ "$status" -eq 0 && -s "$output/stopped" ]]; then  # it is empty if a user made `stop`
        requeue || status=1
    elif [[ "$status" -ne 0 ]]; then
        advice="Correct the cause, then: sbatch run.slurm --output-dir $output"
        echo "run.slurm: error: the job failed, see above. $advice" >&2
    fi
    exit "$status"
}

# Near the time limit (USR1) or at a preemption (TERM): ask train.py to save and end. The time until
# 20 s before the end is for that; then the job is requeued, whether it has ended or not.
stop_in_time() {
    trap "" USR1 TERM            # once is enough
    echo SLURM >"$stop_file"
    (
        left=1
        until [[ "$left" -le 0 ]]; do  # the limit may change meanwhile: ask again
            ends="$(told EndTime)" || ends=""  # SLURM may not answer for a moment
            left="$((${ends:-$(date +%s)} - 20 - $(date +%s)))"
            sleep "$((left > 0 ? left : 0))"
            [[ "$ends" ]] || { left=1 && sleep 10; }
        done
        requeue
    ) &
}

# Requeue the job, unless it was cancelled, or has saved nothing: that would go on for ever.
requeue() {
    [[ "$(told JobState)" == RUNNING ]] || return 0
    [[ "$(find "$output" -maxdepth 1 -name 'checkpoint*' -newer "$output/started-$job")" ]] || {
        echo "run.slurm: error: no new checkpoint, so the job is not requeued: raise --time" >&2
        return 1
    }
    echo "run.slurm: requeueing job $job"
    scontrol requeue "$job" || {
        echo "run.slurm: error: to continue: sbatch run.slurm --output-dir $output" >&2
        return 1
    }
}
