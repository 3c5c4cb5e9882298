# What keeps jobs alive: functions for run.slurm, and for the tasks that it starts. Nobody has to
# read them. run.slurm sources this file from the folder that it was submitted in, and each task
# sources it from $code, the job's copy of the program.
set -eo pipefail
job="$SLURM_JOB_ID"
export SLURM_TIME_FORMAT=%s      # of scontrol: seconds, which no time zone has twice

# Forget what SLURM has told another job, in which this one was submitted: srun would keep to its
# cores and ask for its GPUs, and near the time limit a task of its array would be requeued.
forget_other_job() {
    [[ "${told:-}" != "$SLURM_JOB_ID" ]] || return 0  # a task, whose script has done so
    export told="$SLURM_JOB_ID"
    unset SLURM_CLUSTERS SBATCH_CLUSTERS  # may name another cluster than that of this node
    [[ "${SLURM_CPU_BIND:-}" != *mask* ]] || unset "${!SLURM_CPU_BIND@}"  # the cores of one step
    local shown
    shown="$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)" || return 0
    [[ "$shown" == *" ArrayJobId="* ]] || unset "${!SLURM_ARRAY_@}"
    [[ "$shown" == *" TresPerJob="* ]] || unset SLURM_GPUS
    [[ "$shown" == *" TresPerNode="* ]] || unset SLURM_GPUS_PER_NODE
    [[ "$shown" == *" TresPerTask="* ]] || unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK
    # `asked` is GPUs of each node, such as 2, or 1+1 of two types; or `none`, or empty if unknown.
    asked="$(sed -n '/ TresPerNode=/{s/.*=//p;q}' <<<"$shown" | tr , '\n' |
        sed -n 's/.*gpu.*[:=]//p' | paste -sd +)"
    grep -q "TresPer.*gpu" <<<"$shown" || asked=none
    [[ "$shown" != *" OverSubscribe=NO "* ]] || whole=yes  # the nodes are this job's alone
}
forget_other_job
# In an array the job is this task alone, not the whole array.
[[ -z "${SLURM_ARRAY_JOB_ID:-}" ]] || job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
export OUTPUT_DIR KEPT_CODE      # the tasks, which read this file again, have to find the same
export output="${OUTPUT_DIR:-output/$job}"  # OUTPUT_DIR=output/1234 sbatch run.slurm goes on there
export code="${KEPT_CODE:-$output/code-$job}"
plumbing="${BASH_SOURCE[0]%/*}"  # the folder of this file

# A job that goes on after its time limit does so with the files that it was submitted with,
# whatever has been edited or pulled meanwhile: this file hands over to its copy.
if [[ $((${SLURM_RESTART_COUNT:-0} + ${SUCCESSION:-0})) -gt 0 && -e "$code/plumbing/job.sh" &&
    ! "$plumbing" -ef "$code/plumbing" ]]; then
    source "$code/plumbing/job.sh"
    return
fi
ulimit -Sn "$(ulimit -Hn)"       # open files: rank 0 has a connection to each of hundreds of others
export TORCH_GLOO_LAZY_INIT=1    # PyTorch 2.15: two processes connect when they first need to
# USR1 comes at once where --time is as short as its notice: it would end a script that has no trap.
trap 'signalled=yes early=yes' USR1

fail() {                         # end with one line that says what is wrong
    echo "run.slurm: error: $1" >&2
    exit 2
}

say() {                          # print a line; that the log's disk is full does not end the job
    echo "run.slurm: $1" || true
}

# Check the environment, which must have the Python modules $@, and claim the output folder.
# It sets gpus, the number of each node, output, the folder, and code, the copy of the program.
prepare() {
    PATH="$(realpath -m "$VENV")/bin:$PATH:/usr/sbin:/sbin"
    [[ "$IMAGE" || -x "$VENV/bin/python" ]] ||
        fail "there is no $(realpath -m "$VENV")/bin/python: install as README.md says, or set VENV"
    export IMAGE PYTHONUNBUFFERED=1
    export SLURM_EXPORT_ENV=ALL  # srun passes the environment on, whatever a site's default is
    # The first belongs to another Python; with the second train.py would not find its own folder.
    unset PYTHONHOME PYTHONSAFEPATH
    # They would bind each process to its first core when it imports torch, which with torchrun is
    # the same for all of a node, and its loader workers with it.
    unset OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY
    # One may be of another job, in which this one was submitted: with two of them srun refuses.
    unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
    # For srun in the user's shell: the job's step would end so early, with so few GPUs.
    unset SLURM_TIMELIMIT SLURM_GRES
    if [[ "$IMAGE" == pyxis:* ]]; then
        [[ "$(srun --help)" == *--container-image* ]] ||
            fail "IMAGE=$IMAGE: srun has no --container-image here, so this site has no pyxis"
        [[ "$PWD$(realpath .)" != *[:,]* ]] || fail "pyxis cannot mount $PWD: it has a : or a ,"
    fi
    check_packages "$@"
    [[ "${SLURM_CPUS_PER_TASK:-}" ]] ||
        fail "ask for cores with #SBATCH --cpus-per-task, not with --cpus-per-gpu"
    [[ -z "${SLURM_GPUS:-}" || "$SLURM_JOB_NUM_NODES" -eq 1 ]] ||
        fail "ask for GPUs with #SBATCH --gpus-per-node: --gpus may differ between nodes"
    IFS=, read -ra list <<<"${SLURM_JOB_GPUS:-}"  # SLURM before 21.08 has no number, only this list
    export gpus="${SLURM_GPUS_ON_NODE:-${#list[@]}}"
    share_gpus                   # may change it
    export SLURM_GPUS_ON_NODE="$gpus"
    # CUDA shows each process the first slice alone, and NCCL connects whole GPUs only.
    [[ "${CUDA_VISIBLE_DEVICES:-}" != MIG-* || $((gpus * SLURM_JOB_NUM_NODES)) -le 1 ]] ||
        fail "processes on $((gpus * SLURM_JOB_NUM_NODES)) slices of GPUs (MIG) cannot train \
together: ask for one slice with --nodes=1, or for whole GPUs"
    trap show_stacks USR2        # scancel --signal=USR2 --batch JOBID
    claim_folder
    keep_program                 # in $code
}

# A job with whole nodes has all their GPUs, and its steps those that it has asked for: count only
# these. If it has asked for none, have its steps take all.
share_gpus() {
    if [[ "${asked:-}" == none && "$gpus" -gt 0 ]]; then
        export SLURM_GPUS_PER_NODE="$gpus"
    elif [[ "${asked:-}" =~ ^[1-9][0-9+]*$ ]]; then
        gpus="$((asked < gpus ? asked : gpus))"
    elif [[ "$gpus" -eq 0 && "${whole:-}" && ! "${CUDA_VISIBLE_DEVICES:-}" ]] &&
        [[ "$(scontrol show config 2>/dev/null)" =~ GresTypes\ *=\ *\(null\) ]]; then
        # This SLURM knows no GPUs: the job has all of its nodes.
        gpus="$(nvidia-smi -L 2>/dev/null | grep -c "^GPU ")" || gpus=0
    fi
}

# Refuse an environment without the Python modules $@; say what comes from outside of it.
check_packages() {
    local find="import os, site, sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    find_spec(name) or exit(f'it has no {name}')
others = [*os.environ.get('PYTHONPATH', '').split(':'), site.getusersitepackages()]
for name in (*sys.argv[1:], 'torch', 'numpy'):
    path = getattr(find_spec(name), 'origin', None) or ''
    if any(other and path.startswith(other + '/') for other in others):
        print(path)"
    local found
    found="$(in_image python -c "$find" "$@" 2>&1)" || fail "${IMAGE:-$VENV} cannot run train.py \
($(last_line "$found")): see container.def or README.md"
    found="$(grep "^/" <<<"$found" | sort -u | paste -sd " ")" || true
    [[ -z "$found" ]] ||
        say "by PYTHONPATH or from your home, not from ${IMAGE:-$VENV}, come: $found"
}

# Print the last line of $1, what a program has said. That srun's task has failed is no reason.
last_line() {
    [[ "$IMAGE" != pyxis:* ]] || echo "$1" >&2  # pyxis gives its reasons in several lines
    grep -v "^srun: error: .*: task" <<<"$1" | tail -n 1
}

# Become the command $@, in the image if there is one.
in_image() (
    [[ "$IMAGE" ]] || exec "$@"
    # bash, since some sites' srun would look for $1 outside of the image.
    [[ "$IMAGE" != pyxis:* ]] ||
        srun_in_image --overlap --nodes=1 --ntasks=1 bash -c 'exec "$@"' in_image "$@"
    flags=(--quiet exec --pwd "$(realpath .)")
    [[ "${SLURM_GPUS_ON_NODE:-0}" -eq 0 ]] || flags+=(--nv)  # --rocm for GPUs of AMD
    find_paths "$@"
    for pair in "${pairs[@]}"; do
        flags+=(--bind "$pair")
    done
    program="$(type -P apptainer || type -P singularity || echo apptainer)"
    exec "$program" "${flags[@]}" "$IMAGE" "$@"
)

# Set pairs, as PATH:PLACE, to what an image sees: this folder, data, the file of a stop, and the
# paths among the arguments $@.
find_paths() {
    pairs=()
    for path in . data ${STOP_FILE:+"${STOP_FILE%/*}"} "${@#*=}"; do
        [[ -e "$path" ]] || continue
        real="$(realpath "$path")"
        pairs+=("$real:$real" "$real:$(realpath -s "$path")")
    done
}

# Become srun with the arguments $@, its tasks in the image of IMAGE=pyxis:FILE: in them IMAGE is
# empty. --container-env: of these, pyxis would take the image's, or make its own.
srun_in_image() {
    find_paths "$code" "$@"
    if [[ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ]]; then
        export NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
    fi
    exec env IMAGE= srun --container-image="${IMAGE#pyxis:}" --container-workdir="$PWD" \
        --container-mounts="$(IFS=, && echo "${pairs[*]}")" \
        --container-env=MASTER_ADDR,MASTER_PORT,OMP_NUM_THREADS,PYTHONUNBUFFERED "$@"
}

# For torchrun, which starts the processes of its node: refuse other numbers of tasks. Where the
# header has none, srun starts so many.
one_task_per_node() {
    export SLURM_NTASKS="${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES}"
    [[ "$SLURM_NTASKS" -eq "$SLURM_JOB_NUM_NODES" ]] ||
        fail "$SLURM_NTASKS tasks on $SLURM_JOB_NUM_NODES nodes: set #SBATCH --ntasks-per-node=1"
}

# For spawn: refuse other numbers of tasks and of nodes.
one_task_on_one_node() {
    tasks="${SLURM_NTASKS:-1}"
    [[ "$tasks" -eq 1 && "$SLURM_JOB_NUM_NODES" -eq 1 ]] ||
        fail "$tasks tasks on $SLURM_JOB_NUM_NODES nodes: spawn needs --nodes=1 --ntasks-per-node=1"
}

# Where each task is one process: refuse numbers of tasks that leave GPUs out, or that may differ by
# node, with which Lightning would wait forever.
one_task_per_process() {
    [[ "${SLURM_NTASKS_PER_NODE:-}" && "$gpus" =~ ^(0|"$SLURM_NTASKS_PER_NODE")$ ]] ||
        fail "#SBATCH --ntasks-per-node must be there, equal to --gpus-per-node if there are \
GPUs; --ntasks will not do"
}

# Set OMP_NUM_THREADS for $1 processes, which share the cores of this task.
share_cores() {
    export OMP_NUM_THREADS="$((SLURM_CPUS_PER_TASK > $1 ? SLURM_CPUS_PER_TASK / $1 : 1))"
}

# Have torchrun keep each process on the cores near its GPU, if $1 is one of its words for that;
# refuse what it would end with a traceback.
bind_cores() {
    export NUMA="$1"
    [[ "$NUMA" ]] || return 0
    [[ "$NUMA" =~ ^(node|socket|exclusive|core-complex)$ ]] ||
        fail "NUMA=$NUMA: it has to be node, socket, exclusive or core-complex"
    [[ "$gpus" -gt 0 ]] || fail "NUMA=$NUMA is for cores near a GPU, but this job has no GPUs"
    local find="import os, shutil
from importlib.util import find_spec
torch = os.path.dirname(find_spec('torch').origin)
os.path.exists(torch + '/numa') or exit('PyTorch 2.9 or newer')
shutil.which('numactl') or exit('the program numactl, which is not installed')"
    local found
    found="$(in_image python -c "$find" 2>&1)" ||
        fail "NUMA=$NUMA needs $(last_line "$found") in ${IMAGE:-$VENV or on $(uname -n)}"
}

# Print this node's own address on the way to the host $1.
own_address() {
    route="$(ip -4 route get "$(getent ahostsv4 "$1" | sed -n '1s/ .*//p')")" || return 1
    sed -n 's/.* src \([^ ]*\).*/\1/p' <<<"$route"
}

# Set where the processes meet: this node's address on the way to the second node, since its name
# may resolve to 127.0.1.1, and a port of this job, below those that the system gives out.
meet_at_this_node() {
    export MASTER_ADDR=127.0.0.1 MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"
    [[ "$SLURM_JOB_NUM_NODES" -gt 1 ]] || return 0
    second="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)"
    shown="$(scontrol show node --oneliner "$second")" || shown=" NodeAddr=$second"
    address="$(sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p' <<<"$shown")"
    MASTER_ADDR="$(own_address "$address")" ||
        fail "this node finds no IPv4 route to $second: ask your site's support"
}

# Set GLOO_SOCKET_IFNAME, unless the environment has it: Gloo would look up its host's name, which
# may fail. It also sets address, this node's on the way to the first.
choose_interface() {
    if [[ ! "$(type -P ip)" ]]; then
        ask_python
        return
    fi
    address="$(own_address "$MASTER_ADDR")"
    interface="$(ip -4 -o address show to "$address" | awk '{ print $2 }')"
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
    for name in ${GLOO_SOCKET_IFNAME//,/ }; do
        [[ "$(ip -o address show "$name" 2>/dev/null)" ]] && continue
        others="$(ip -o address | awk '{ print $2 }' | sort -u | paste -sd ' ')"
        fail "GLOO_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME: $(uname -n) has no interface $name with an \
address; it has: $others"
    done
}

# The same where there is no program `ip`, as in most images.
ask_python() {
    local find="import fcntl, socket, struct
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect(('$MASTER_ADDR', 9))  # sends nothing
print(probe.getsockname()[0])
for _, name in socket.if_nameindex():
    try:
        answer = fcntl.ioctl(probe, 0x8915, struct.pack('256s', name.encode()))  # SIOCGIFADDR
    except OSError:
        continue
    if socket.inet_ntoa(answer[20:24]) == probe.getsockname()[0]:
        print(name)"
    local found
    found="$(python -c "$find")"
    address="${found%%$'\n'*}"
    [[ "$found" == "$address" ]] ||
        export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-${found##*$'\n'}}"
}

# Until the job ends, note what GPUs and processors of this node say, for runs/usage.py.
log_usage() {
    [[ "${LOG_EVERY:=10}" != 0 && "${SLURM_LOCALID:-0}" -eq 0 ]] || return 0
    file="$output/usage-$(uname -n).txt"
    start="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    (
        trap "" USR1 USR2 TERM
        something=""             # has been said once; otherwise this ends at once
        # Lines with another beginning are errors.
        while said="$(ask_devices | grep '^[0-9cd]')"; [[ "${something:=$said}" ]]; do
            printf '\n%s %s\n%s\n' "$(date +%s.%2N)" "$start" "$said" >>"$file"
            sleep "$LOG_EVERY"
        done
    ) </dev/null &>/dev/null &
}

# Print what GPUs of NVIDIA, or otherwise of AMD, say, and the energy of processors where users may
# read that.
ask_devices() {
    if [[ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ]]; then
        ask_nvidia event || ask_nvidia throttle ||  # the second name: drivers before 535
            timeout -s 9 30 rocm-smi --showuse --showmeminfo vram --showpower --showclocks --csv
    fi
    for zone in /sys/class/powercap/intel-rapl:*/; do
        paste -d, "${zone}energy_uj" "${zone}max_energy_range_uj" "${zone}name"
    done
}

ask_nvidia() {                   # print a line for each of this job's GPUs; $1 names a column
    local columns=index,utilization.gpu,memory.used,power.draw,clocks.sm
    timeout -s 9 30 nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} \
        --format=csv,noheader,nounits --query-gpu="$columns,clocks_${1}_reasons.active"
}

# Have all Python processes of the job print their stacks; needs SLURM 20.11 or newer.
show_stacks() {
    signalled=yes
    srun --overlap --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" \
        bash -c 'source "$code/plumbing/job.sh"; ask_for_stacks' &
}

# On each node: signal USR2 to the processes that listen to it. It would end all others.
ask_for_stacks() {
    for process in /proc/[0-9]*; do
        [[ "$(readlink "$process/exe")" == */python* ]] || continue
        grep -qzx "SLURM_JOB_ID=$SLURM_JOB_ID" "$process/environ" || continue
        caught="$(sed -n 's/^SigCgt:[[:space:]]*//p' "$process/status")" || continue
        (((16#$caught >> 11) % 2)) || continue  # the bit of signal 12, USR2
        kill -USR2 "${process##*/}" || continue
        sleep 0.1                # not all at once: a loader's worker writes where its parent does
    done 2>/dev/null
    return 0
}

# Leave the exit status of process $1 in $status. A signal ends `wait` early; its trap says so in
# $signalled, and then this waits again.
wait_for() {
    signalled=yes
    while [[ "$signalled" ]]; do
        signalled=""
        wait "$1" && status=0 || status=$?
    done
}

# Run $@, the job's step, in the background, so that traps work meanwhile; then requeue the job if
# train.py was asked to stop, and end with the step's status.
run() {
    [[ "$IMAGE" != pyxis:* ]] || set -- srun_in_image "${@:2}"
    "$@" &
    step=$!
    [[ ! "${early:-}" ]] || kill -USR1 "$$"  # again, since now it is heard
    wait_for "$step"
    if [[ "$status" -eq 0 && "$output/stopped" -nt "$started" ]]; then
        requeue || status=1
    elif [[ "$status" -eq 0 && "${successor:-}" ]]; then
        scancel "$successor"     # this job has finished in time after all
    fi
    if [[ "$status" -ne 0 ]]; then
        advice="Fix the cause, then: OUTPUT_DIR=$output sbatch run.slurm"
        echo "run.slurm: error: the job failed, see above. $advice" >&2
    fi
    exit "$status"
}

# Run $@ in a task. SLURM's signals reach the task alone: it makes a file, for which train.py looks.
# When torchrun restarts its processes, they meet at a new port, and the old ones get 5 s to end.
until_asked_to_stop() {
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5
    folder="$(mktemp -d 2>/dev/null)" || folder="$(mktemp -d -p /tmp)"  # TMPDIR may not exist here
    export STOP_FILE="$folder/stop" PET_SIGNALS_TO_HANDLE=SIGINT
    # Something may have emptied /tmp meanwhile.
    trap 'signalled=yes; mkdir -p "$folder" && touch "$STOP_FILE" || true' USR1 TERM
    (trap "" USR1 TERM; "$@") &
    wait_for "$!"
    rm -rf "$folder"
    exit "$status"
}

# On USR1, where train.py stops after any step: have each task tell it, so that it saves and ends.
stop_near_time_limit() {
    trap "" USR1                 # once is enough
    signalled=yes
    until near_end; do
        # A task does not listen while it starts: tell it again.
        [[ "${step:-}" ]] && ! kill -USR1 "$step" 2>/dev/null && return 0
        sleep 5
    done
    requeue || true
}

# On USR1, where train.py saves after each epoch only: wait for the next, while there is time.
requeue_near_time_limit() {
    trap "" USR1                 # once is enough
    signalled=yes
    touch "$output/noticed"
    until near_end || [[ "$(saved "$output/noticed")" ]]; do
        kill -0 "${step:-$$}" 2>/dev/null || return 0
        sleep 2
    done
    requeue || true
}

# The caller hears of a file that cannot be read.
# shellcheck source=plumbing/requeue.sh
source "$plumbing/requeue.sh" || return  # claim_folder, keep_program, near_end, requeue, saved
# shellcheck source=plumbing/gloo.sh
source "$plumbing/gloo.sh" || return  # choose_launcher, join_others, for Horovod
# shellcheck source=plumbing/staging.sh
source "$plumbing/staging.sh"    # stage_data
