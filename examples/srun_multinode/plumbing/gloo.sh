# LAUNCH=gloo sbatch run.slurm, for Horovod: several nodes without MPI and without ssh. srun starts
# the processes here, too. They find each other through Horovod's own rendezvous server, as with
# horovodrun, and as there it answers whoever can connect to this node. job.sh sources this file.

# With LAUNCH=gloo: start the server, and set mpi, the type for srun, to none.
choose_launcher() {
    [[ "$LAUNCH" != mpi ]] || return 0
    [[ "$LAUNCH" == gloo ]] || fail "there is no LAUNCH=$LAUNCH: it is mpi, the default, or gloo"
    tasks="${SLURM_NTASKS:-0}"
    [[ "$SLURM_TASKS_PER_NODE" != *,* && $((tasks % SLURM_JOB_NUM_NODES)) -eq 0 ]] ||
        fail "LAUNCH=gloo needs equally many tasks on each node: set #SBATCH --ntasks-per-node, \
and no --ntasks"
    export mpi=none
    meet_at_this_node
    local server_code="import sys
from horovod.runner.http.http_server import RendezvousServer
print(RendezvousServer().start(), flush=True)
sys.stdin.read()"
    # Its input is this script's: it ends when this script does.
    coproc server { in_image python -c "$server_code"; }
    export HOROVOD_GLOO_RENDEZVOUS_ADDR="$MASTER_ADDR" HOROVOD_GLOO_RENDEZVOUS_PORT
    read -r HOROVOD_GLOO_RENDEZVOUS_PORT <&"${server[0]}" ||
        fail "Horovod's rendezvous server does not start, see above: LAUNCH=gloo needs it"
}

# In each task, with LAUNCH=gloo: set what horovodrun would set.
join_others() {
    [[ "$LAUNCH" == gloo ]] || return 0
    choose_interface
    export HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo
    export HOROVOD_GLOO_IFACE="$GLOO_SOCKET_IFNAME"
    export HOROVOD_RANK="$SLURM_PROCID" HOROVOD_SIZE="$SLURM_STEP_NUM_TASKS"
    export HOROVOD_HOSTNAME="$SLURMD_NODENAME"
    export HOROVOD_LOCAL_RANK="$SLURM_LOCALID"
    export HOROVOD_LOCAL_SIZE="${SLURM_STEP_TASKS_PER_NODE%%(*}"
    export HOROVOD_CROSS_RANK="$SLURM_NODEID" HOROVOD_CROSS_SIZE="$SLURM_STEP_NUM_NODES"
}
