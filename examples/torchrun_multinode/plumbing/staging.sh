# STAGE=1 sbatch run.slurm, where an example calls stage_data: each node reads the data from its own
# disk. Needs SLURM 21.08 or newer. job.sh sources this file.
# shellcheck disable=SC2034,SC2154

# Where STAGE=1, have each node copy what flags of train.py name to its SLURM_TMPDIR, TMPDIR or
# /tmp. Set `staged` to these flags with the copies. $@ are the flags, each with its default.
stage_data() {
    staged=()
    [[ "${STAGE:-}" == 1 ]] || return 0
    # A copy's path is this and the whole path of its original; records.py relies on that.
    export STAGE_DIR="${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/data-$job"
    local default flag path word before paths=()
    for default in "$@"; do
        flag="${default%%=*}" path="${default#*=}" before=""
        for word in "${arguments[@]}"; do  # train.py also takes the beginning of a flag
            [[ "$before" == --?* && "$flag" == "$before"* ]] && path="$word"
            [[ "$word" == --?*=* && "$flag" == "${word%%=*}"* ]] && path="${word#*=}"
            before="$word"
        done
        [[ "$path" ]] || continue
        path="$(realpath -ms "$path")"
        paths+=("$path")
        staged+=("$flag" "$STAGE_DIR$path")
    done
    [[ "${paths[*]}" ]] || fail "STAGE=1 finds nothing to copy: say what, with ${*%%=*}"
    rm -rf "$output/staged"
    mkdir "$output/staged"
    # A file that other nodes must not see: they would remove one another's copies.
    export STAGE_MARK
    STAGE_MARK="$(mktemp "$STAGE_DIR-XXXXXX")" || fail "STAGE=1 needs a folder ${STAGE_DIR%/*}"
    srun --overlap --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" \
        bash -c 'source "$code/plumbing/job.sh"; keep_copy "$@"' keep_copy "${paths[@]}" &
    keeper=$!
    trap '{ kill -USR1 "$keeper" && wait "$keeper"; } || true
        rm -rf "$output/staged" "$STAGE_MARK"' EXIT
    until [[ "$(find "$output/staged" -name '[0-9]*' | wc -l)" -eq "$SLURM_JOB_NUM_NODES" ]]; do
        [[ ! -e "$output/staged/failed" ]] ||
            fail "the data could not be copied to all nodes, see above"
        kill -0 "$keeper" 2>/dev/null || fail "the copying step has ended, see above"
        sleep 1
    done
    rm "$STAGE_MARK"
    say "copied ${paths[*]} to $STAGE_DIR on $SLURM_JOB_NUM_NODES nodes in $SECONDS s"
}

# On each node: copy $@, wait, and remove the copies when the job ends, also where it is cancelled
# or requeued: a job that ends can start no other step, which could remove them.
keep_copy() {
    if [[ "$SLURM_NODEID" -gt 0 && -e "$STAGE_MARK" ]]; then
        touch "$output/staged/failed"
        fail "all nodes see the same ${STAGE_DIR%/*}: set TMPDIR to a disk of each node, as /tmp"
    fi
    trap 'kill "$!" || true; rm -rf "$STAGE_DIR"; exit' USR1 TERM
    # A folder of its own: what others may have put there, such as links, is removed, or this fails.
    # Copies are files, also of links, and can be removed, also where the originals cannot.
    { rm -rf "$STAGE_DIR" && mkdir -m 700 "$STAGE_DIR" &&
        exec cp -rL --no-preserve=mode --parents "$@" "$STAGE_DIR"; } &
    if ! wait "$!"; then
        touch "$output/staged/failed"
        rm -rf "$STAGE_DIR"
        exit 1
    fi
    touch "$output/staged/$SLURM_NODEID"
    # A job that is asked to stop may still read. At its end SLURM sends the signal again.
    trap 'is_running || { kill "$!" || true; rm -rf "$STAGE_DIR"; exit; }' TERM
    while true; do
        sleep 1000 &
        wait "$!" || true
    done
}

is_running() (
    unset "${!SQUEUE_@}"         # of the user's shell, which may hide a job that runs
    [[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" == RUNNING ]]
)
