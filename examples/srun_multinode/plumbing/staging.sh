# STAGE=1 sbatch run.slurm, where an example calls stage_data: each node reads the data from its own
# disk. Needs SLURM 21.08 or newer. job.sh sources this file.
# shellcheck disable=SC2034,SC2154

# Where STAGE=1, have each node copy DATA_DIR to its TMPDIR, or /tmp, and set data_dir to the flag.
stage_data() {
    data_dir=()
    [[ "${STAGE:-}" == 1 ]] || return 0
    export stage="${TMPDIR:-/tmp}/data-$job"
    data_dir=(--data-dir "$stage")
    rm -rf "$output/staged"
    mkdir "$output/staged"
    srun --overlap --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" \
        bash -c 'source "$code/plumbing/job.sh"; keep_copy' &
    keeper=$!
    trap '{ kill -USR1 "$keeper" && wait "$keeper"; } || true; rm -rf "$output/staged"' EXIT
    until [[ "$(find "$output/staged" -name '[0-9]*' | wc -l)" -eq "$SLURM_JOB_NUM_NODES" ]]; do
        [[ ! -e "$output/staged/failed" ]] ||
            fail "the data could not be copied to all nodes, see above"
        kill -0 "$keeper" 2>/dev/null || fail "the copying step has ended, see above"
        sleep 1
    done
    echo "run.slurm: copied ${DATA_DIR:-data} to $stage on $SLURM_JOB_NUM_NODES nodes in $SECONDS s"
}

# On each node: copy the data, wait, and remove them when the job ends, also where it is cancelled
# or requeued: a job that ends can start no other step, which could remove them.
keep_copy() {
    trap 'kill "$!" || true; rm -rf "$stage"; exit' USR1 TERM
    # A folder of its own: what others may have put there, such as links, is removed, or this fails.
    { rm -rf "$stage" && mkdir -m 700 "$stage" && exec cp -rT "${DATA_DIR:-data}" "$stage"; } &
    if ! wait "$!"; then
        touch "$output/staged/failed"
        rm -rf "$stage"
        exit 1
    fi
    touch "$output/staged/$SLURM_NODEID"
    while true; do
        sleep 1000 &
        wait "$!"
    done
}
