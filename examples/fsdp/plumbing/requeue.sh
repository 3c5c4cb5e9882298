# How a job goes on after its time limit: by a requeue, or where SLURM refuses that by another job,
# and with the program that it was submitted with. job.sh sources this file, and sets job, output
# and code.
# shellcheck disable=SC2154
arguments=("$@")                 # of run.slurm: `source` without arguments hands them on

# Refuse $output if another job that had this job's id has left it; note in it whose it is.
claim_folder() {
    shown="$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)" || true
    submitted="$(sed -n '/SubmitTime=/{s/.*SubmitTime=\([^ ]*\).*/\1/p;q}' <<<"$shown")"
    cluster="${SLURM_CLUSTER_NAME:--}"
    own="$cluster $job ${submitted:-?}"  # a requeue changes the time
    started="$output/started-$job"  # of this job alone: another may come while this one runs
    noted="$(cat "$started" 2>/dev/null)" || true
    [[ "$noted" ]] || noted="$own"
    # It is the same job if this is a restart, the next in a chain, or a second run.slurm in one
    # allocation; and not on the other one of two clusters.
    same=""
    if [[ "${SLURM_RESTART_COUNT:-0}" -gt 0 && ! -e "$started.refused" || "${KEPT_CODE:-}" ||
        -s "$started" && "$own" == "$noted" ]]; then
        same=yes
    fi
    [[ "$noted" == "$cluster "* || "${OUTPUT_DIR:-}" ]] || same=""
    others="$(ls -d "$output"/started* "$output/.lock" 2>/dev/null)" || true
    if [[ ! "$same" && ! "${OUTPUT_DIR:-}" && "$others" ]]; then
        # It is refused again when it is requeued.
        [[ "$noted" != "$cluster "* ]] || touch "$started.refused"
        fail "$output is of another run with the id $job: move it away, or go on: \
OUTPUT_DIR=$output sbatch run.slurm"
    fi
    mkdir -p "$output"
    echo "$own" 2>/dev/null >"$started" || touch "$started"  # the disk may be full
}

# Copy the program to $code: a restart runs it as it was, whatever is edited meanwhile.
keep_program() {
    # A new job that continues in the folder makes a copy of its own.
    [[ "$same" || ! -d "$code" ]] || mv "$code" "$code-$(date +%s)"
    if [[ -d "$code" ]]; then
        edited=""
        while IFS= read -rd "" file; do
            cmp -s "$code/$file" "./$file" || edited+=" $(printf %q "$file")"
        done < <(find "$code" -type f ! -name "*.pyc" ! -name .commit -printf "%P\0")
        [[ -z "$edited" ]] || edited="; changed since, for new jobs only:$edited"
        say "running $code, as it first started$edited"
        return
    fi
    rm -rf "$code.part"
    mkdir "$code.part"
    left_out=""
    copy_program . "$code.part"
    [[ -z "$left_out" ]] ||
        say "not in the copy of the program, since neither file nor folder:$left_out"
    git describe --always --dirty --abbrev=40 --exclude="*" >"$code.part/.commit" 2>/dev/null ||
        true                     # there is no git
    mv "$code.part" "$code"
}

# Copy scripts, settings and folders of the program from folder $1 to $2; link all else: it may be
# large.
copy_program() {
    local path files=()
    while IFS= read -rd "" path; do
        files+=("$path")
    done < <(find -L "./$1" -maxdepth 1 -type f -readable -size -10000k -regextype posix-extended \
        -regex '.*\.(py|sh|json|yaml|yml|toml)' -print0 2>/dev/null)
    for path in "${files[@]}"; do
        cp -L --preserve=timestamps "$path" "$2" || [[ ! -e "$path" ]] ||
            fail "cannot copy ${path#././} to $code, see above"
    done
    for path in "$1"/* "$1"/.[!.]*; do
        path="${path#./}"
        name="${path##*/}"
        if [[ "$1" == . && "$name" =~ ^\.|\.(out|log)$ || "$name" == __pycache__ ]]; then
            continue
        elif [[ -e "$2/$name" ]]; then
            continue             # it has been copied
        elif [[ -d "$path" ]] && is_of_program "$path"; then
            mkdir "$2/$name"
            copy_program "$path" "$2/$name"
        elif [[ -f "$path" || -d "$path" && "$code/" != @("$PWD/"|)"$path"/* ]]; then
            ln -s "$PWD/$path" "$2"
        elif [[ -L "$path" || -e "$path" && ! -d "$path" ]]; then
            left_out+=" $(printf %q "$path")"  # a link to nothing, such as an editor's lock; a pipe
        fi
    done
}

# Return whether folder $1 is of the program: a package, or where SCRIPT is. Such a folder has few
# files, and is no link to where it is.
is_of_program() {
    local files=("$1"/*.py)
    [[ -e "$1/__init__.py" || "$1" == */* && -e "${files[0]}" || "/${SCRIPT:-}" == *"/$1/"* ]] ||
        return 1
    [[ ! -L "$1" || "$1" != */* && "$(realpath .)/" != "$(realpath "$1")"/* ]] || return 1
    [[ "$(find "./$1/" -maxdepth 1 | head -1001 | wc -l)" -le 1000 ]]
}

# Print the checkpoint, or what predict.py writes, if it is newer than the file $1.
saved() {
    find "$output/checkpoint.pt" "$output/checkpoint.npz" "$output/checkpoint/run.json" \
        "$output/parts" -newer "$1" 2>/dev/null || true
}

# Return whether SLURM ends the job in 20 seconds, as it says now: a limit can be changed.
near_end() {
    noticed="${noticed:-$SECONDS}"
    said="$(scontrol show job "$job" | sed -n 's/.* EndTime=\([^ ]*\).*/\1/p')" || said=""
    ends="${said:-${ends:-}}"    # the controller may not answer for a moment
    if [[ "$ends" =~ ^[0-9]+$ ]]; then
        [[ "$(date +%s)" -ge $((ends - 20)) ]]
    else                         # without a limit or an answer, as if it was 65 seconds away
        [[ "$ends" != Unknown && $((SECONDS - noticed)) -ge 45 ]]
    fi
}

# Requeue the job, unless its time was not enough to save anything since the last restart: that
# would go on for ever. A job that is preempted is not near its time limit.
requeue() {
    restarts=$((${SLURM_RESTART_COUNT:-0} + ${SUCCESSION:-0}))
    if [[ "$restarts" -gt 0 && "${noticed:-}" && -z "$(saved "$started")" ]]; then
        reason="no new checkpoint since the last restart"
        echo "run.slurm: error: $reason: not requeued again; raise --time" >&2
        return 1
    fi
    say "requeueing job $job"
    ask_to_requeue || succeed || {
        echo "run.slurm: error: the requeue failed, see above" >&2
        return 1
    }
}

# Ask three times, unless SLURM says no: it may be without its controller for a moment.
ask_to_requeue() {
    for pause in 5 5 0; do
        refusal="$(scontrol requeue "$job" 2>&1)" && return 0
        echo "$refusal" >&2
        [[ "$refusal" =~ [Uu]nable\ to\ contact|timed\ out|refused|not\ responding ]] || return 1
        sleep "$pause"
    done
    return 1
}

# Where SLURM refuses a requeue: submit a job that goes on when this one has ended.
succeed() {
    [[ -z "${successor:-}" ]] || return 0
    if [[ "${SUCCESSION:-0}" -ge "${SUCCESSORS:-50}" ]]; then
        reason="since SUCCESSORS is ${SUCCESSORS:-50}"
        echo "run.slurm: error: no further job after ${SUCCESSION:-0}, $reason" >&2
        return 1
    fi
    shown="$(scontrol show job "$job")" || return 1
    log="$(readlink "/proc/$$/fd/1")"
    options_of_this_job
    successor="$(
        export OUTPUT_DIR="$output" KEPT_CODE="$code" SUCCESSION="$((${SUCCESSION:-0} + 1))"
        for name in "${!SLURM_@}"; do  # what SLURM has told this job is not for the next
            [[ "$name" == SLURM_CONF ]] || unset "$name"
        done
        sbatch --parsable --export=ALL --dependency="afterany:$job" --open-mode=append \
            "${options[@]}" "$0" "${arguments[@]}"
    )" || return 1
    successor="${successor##*$'\n'}"  # some sites' sbatch says more, before the id
    successor="${successor%%;*}"
    say "SLURM refuses to requeue job $job: job $successor will continue it, in $log"
}

# Set `options` to those of sbatch which this job has, and which may not stand in run.slurm.
options_of_this_job() {
    options=(--job-name="$SLURM_JOB_NAME" --output="$log")
    pairs=(partition:Partition account:Account qos:QOS time:TimeLimit nodes:NumNodes
        cpus-per-task:CPUs/Task mem:MinMemoryNode mem-per-cpu:MinMemoryCPU constraint:Features
        reservation:Reservation licenses:Licenses nodelist:ReqNodeList exclude:ExcNodeList)
    [[ "${SLURM_GPUS_PER_NODE:-}" ]] || pairs+=(gres:TresPerNode)  # otherwise it has GPUs, too
    for pair in "${pairs[@]}"; do
        value="$(sed -n "\| ${pair#*:}=|{s|.* ${pair#*:}=\([^ ]*\).*|\1|p;q}" <<<"$shown")"
        [[ "$value" =~ ^(0|\(null\)|)$ ]] || options+=("--${pair%:*}=${value//gres[:\/]/}")
    done
    [[ -z "${SLURM_GPUS_PER_NODE:-}" ]] || options+=(--gpus-per-node="$SLURM_GPUS_PER_NODE")
    [[ -z "${SLURM_NTASKS_PER_NODE:-}" ]] || options+=(--ntasks-per-node="$SLURM_NTASKS_PER_NODE")
    [[ -z "${SLURM_ARRAY_TASK_ID:-}" ]] || options+=(--array="$SLURM_ARRAY_TASK_ID")
}
