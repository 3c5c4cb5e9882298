# How a job goes on after its time limit, for plumbing.sh: by a requeue, or where that is refused by another job, and
# with the program that it was submitted with.
# The same file in all examples of the repository. The variables job and output are set by `prepare`.
# shellcheck disable=SC2154
arguments=("$@")                 # of run.slurm: `source` without arguments hands them on

claim_folder() {                 # refuse $output if another job that had this job's id has left it; note whose it is
    shown="$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)" || true
    submitted="$(sed -n '/SubmitTime=/{s/.*SubmitTime=\([^ ]*\).*/\1/p;q}' <<<"$shown")"  # a requeue changes it
    own="${SLURM_CLUSTER_NAME:--} $job ${submitted:-?}"
    started="$output/started-$job"  # of this job alone: another may come, and be refused, while this one runs
    noted="$(cat "$started" 2>/dev/null)" || true
    same=yes                     # job: it is a restart, the next in a chain, or a second run.slurm in one allocation
    [[ "${SLURM_RESTART_COUNT:-0}" -gt 0 && ! -e "$started.refused" || "${KEPT_CODE:-}" || "$own" == "$noted" ]] ||
        same=""
    [[ "${noted:-$own}" == "${own%% *} "* || "${OUTPUT_DIR:-}" ]] || same=""  # the other cluster of two
    others="$(find "$output/" -maxdepth 1 \( -name "started*" -o -name .lock \) 2>/dev/null)" || true
    if [[ ! "$same" && ! "${OUTPUT_DIR:-}" && "$others" ]]; then
        [[ "${noted:-$own}" != "${own%% *} "* ]] || touch "$started.refused"  # also after `scontrol requeue`
        fail "$output is of another run with the id $job: move it away, or go on: OUTPUT_DIR=$output sbatch run.slurm"
    fi
    mkdir -p "$output"
    echo "$own" 2>/dev/null >"$started" || touch "$started"  # the disk may be full
}

keep_program() {                 # copy the program to $code: a restart runs it as it was, whatever is edited meanwhile
    export code="${KEPT_CODE:-$output/code-$job}"  # a new job that continues in the folder makes a copy of its own
    [[ "$same" || ! -d "$code" ]] || mv "$code" "$code-$(date +%s)"  # of another job, which had the same id
    if [[ -d "$code" ]]; then
        edited=""
        while IFS= read -rd "" file; do
            cmp -s "$code/$file" "./$file" || edited+=" $(printf %q "$file")"
        done < <(find "$code" -type f ! -name "*.pyc" ! -name .commit -printf "%P\0")
        echo "run.slurm: running $code, as it was submitted${edited:+; edited since, for new jobs only:}$edited"
        return
    fi
    rm -rf "$code.part"
    mkdir "$code.part"
    left_out=""
    copy_program . "$code.part"
    [[ -z "$left_out" ]] || echo "run.slurm: not in the copy of the program, since neither file nor folder:$left_out"
    git describe --always --dirty --abbrev=40 --exclude="*" >"$code.part/.commit" 2>/dev/null || true
    mv "$code.part" "$code"
}

copy_program() {                 # copy Python's files, settings and packages in $1; link all else: it may be large
    local path files=()
    while IFS= read -rd "" path; do
        files+=("$path")
    done < <(find -L "./$1" -maxdepth 1 -type f -readable -size -10000k -regextype posix-extended \
        -regex '.*\.(py|json|yaml|yml|toml)' -print0 2>/dev/null)
    for path in "${files[@]}"; do
        cp -L --preserve=timestamps "$path" "$2" || [[ ! -e "$path" ]] ||
            fail "cannot copy ${path#././} to $code, see above"
    done
    for path in "$1"/* "$1"/.[!.]*; do
        path="${path#./}"
        name="${path##*/}"
        if [[ "$1" == . && "$name" =~ ^\.|\.(out|log)$ || "$name" == __pycache__ || -e "$2/$name" ]]; then
            continue
        elif [[ -d "$path" ]] && is_package "$path"; then
            mkdir "$2/$name"
            copy_program "$path" "$2/$name"
        elif [[ -f "$path" || -d "$path" && "$code/" != @("$PWD/"|)"$path"/* ]]; then
            ln -s "$PWD/$path" "$2"
        elif [[ -L "$path" || -e "$path" && ! -d "$path" ]]; then  # a link to nothing, such as an editor's lock; a pipe
            left_out+=" $(printf %q "$path")"
        fi
    done
}

is_package() {                   # whether a folder is one of the program's: with few files, and no link to where it is
    local files=("$1"/*.py)
    [[ -e "$1/__init__.py" || "$1" == */* && -e "${files[0]}" ]] || return 1
    [[ ! -L "$1" || "$1" != */* && "$(realpath .)/" != "$(realpath "$1")"/* ]] || return 1
    [[ "$(find "./$1/" -maxdepth 1 | head -1001 | wc -l)" -le 1000 ]]
}

saved() {                        # print the checkpoint, or what predict.py writes, if it is newer than the file $1
    find "$output"/{checkpoint{.pt,.npz,/run.json},parts} -newer "$1" 2>/dev/null || true
}

near_end() {                     # whether SLURM ends the job in 20 seconds, as it says now: a limit can be changed
    noticed="${noticed:-$SECONDS}"
    ends="$(scontrol show job "$job" | sed -n 's/.* EndTime=\([^ ]*\).*/\1/p')" || ends=""
    if [[ "$ends" == *T* ]]; then
        [[ "$(date +%s)" -ge $(($(date -d "$ends" +%s) - 20)) ]]
    else                         # it has no limit, or SLURM does not answer: then as if that was 65 seconds away
        [[ "$ends" != Unknown && $((SECONDS - noticed)) -ge 45 ]]
    fi
}

requeue() {                      # unless nothing was saved since the last restart: that would go on forever
    if [[ $((${SLURM_RESTART_COUNT:-0} + ${SUCCESSION:-0})) -gt 0 && -z "$(saved "$started")" ]]; then
        echo "run.slurm: error: no new checkpoint since the last restart: not requeued again; raise --time" >&2
        return 1
    fi
    echo "run.slurm: requeueing job $job"
    ask_to_requeue || succeed || { echo "run.slurm: error: the requeue failed, see above" >&2; return 1; }
}

ask_to_requeue() {               # three times, unless SLURM says no: it may be without its controller for a moment
    for pause in 5 5 0; do
        refusal="$(scontrol requeue "$job" 2>&1)" && return 0
        echo "$refusal" >&2
        [[ "$refusal" =~ [Uu]nable\ to\ contact|timed\ out|refused|not\ responding ]] || return 1
        sleep "$pause"
    done
    return 1
}

succeed() {                      # where SLURM refuses that: submit a job that goes on when this one has ended
    [[ -z "${successor:-}" ]] || return 0
    if [[ "${SUCCESSION:-0}" -ge "${SUCCESSORS:-50}" ]]; then
        echo "run.slurm: error: no further job after ${SUCCESSION:-0}, since SUCCESSORS is ${SUCCESSORS:-50}" >&2
        return 1
    fi
    shown="$(scontrol show job "$job")" || return 1
    log="$(readlink "/proc/$$/fd/1")"
    options=(--job-name="$SLURM_JOB_NAME" --output="$log")
    pairs=(partition:Partition account:Account qos:QOS time:TimeLimit nodes:NumNodes cpus-per-task:CPUs/Task
        mem:MinMemoryNode mem-per-cpu:MinMemoryCPU constraint:Features reservation:Reservation licenses:Licenses
        nodelist:ReqNodeList exclude:ExcNodeList)  # options of sbatch, which may not stand in run.slurm
    [[ "${SLURM_GPUS_PER_NODE:-}" ]] || pairs+=(gres:TresPerNode)  # where this has GPUs, too
    for pair in "${pairs[@]}"; do
        value="$(sed -n "\| ${pair#*:}=|{s|.* ${pair#*:}=\([^ ]*\).*|\1|p;q}" <<<"$shown")"
        [[ "$value" =~ ^(0|\(null\)|)$ ]] || options+=("--${pair%:*}=${value//gres[:\/]/}")
    done
    [[ -z "${SLURM_GPUS_PER_NODE:-}" ]] || options+=(--gpus-per-node="$SLURM_GPUS_PER_NODE")
    [[ -z "${SLURM_NTASKS_PER_NODE:-}" ]] || options+=(--ntasks-per-node="$SLURM_NTASKS_PER_NODE")
    [[ -z "${SLURM_ARRAY_TASK_ID:-}" ]] || options+=(--array="$SLURM_ARRAY_TASK_ID")  # this task alone
    successor="$(
        export OUTPUT_DIR="$output" KEPT_CODE="$code" SUCCESSION="$((${SUCCESSION:-0} + 1))"
        for name in "${!SLURM_@}"; do  # what SLURM has told this job is not for the next
            [[ "$name" == SLURM_CONF ]] || unset "$name"
        done
        sbatch --parsable --dependency="afterany:$job" --open-mode=append "${options[@]}" "$0" "${arguments[@]}"
    )" || return 1
    successor="${successor%%;*}"
    echo "run.slurm: SLURM refuses to requeue job $job: job $successor will continue it, in $log"
}
