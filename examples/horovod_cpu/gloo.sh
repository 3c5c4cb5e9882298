# LAUNCH=gloo sbatch run.slurm: several nodes without MPI and without ssh. Nobody has to read this.
# srun starts the processes here, too. They find each other through Horovod's own rendezvous server, as with horovodrun,
# and as there it answers whoever can connect to this node.

choose_launcher() {              # with LAUNCH=gloo: start the server, and set mpi, the type for srun, to none
    [[ "$LAUNCH" != mpi ]] || return 0
    [[ "$LAUNCH" == gloo ]] || fail "there is no LAUNCH=$LAUNCH: it is mpi, the default, or gloo"
    [[ "$SLURM_TASKS_PER_NODE" != *,* && $((${SLURM_NTASKS:-0} % SLURM_JOB_NUM_NODES)) -eq 0 ]] ||
        fail "LAUNCH=gloo needs equally many tasks on each node: set #SBATCH --ntasks-per-node, and no --ntasks"
    export mpi=none
    meet_at_this_node
    local server_code="import sys; from horovod.runner.http.http_server import RendezvousServer
print(RendezvousServer().start(), flush=True); sys.stdin.read()"
    coproc server { in_image python -c "$server_code"; }  # its input is this script's: it ends with that
    export HOROVOD_GLOO_RENDEZVOUS_ADDR="$MASTER_ADDR" HOROVOD_GLOO_RENDEZVOUS_PORT
    read -r HOROVOD_GLOO_RENDEZVOUS_PORT <&"${server[0]}" ||
        fail "Horovod's rendezvous server does not start, see above: LAUNCH=gloo needs it"
}

join_others() {                  # in each task, with LAUNCH=gloo: set what horovodrun would set
    [[ "$LAUNCH" == gloo ]] || return 0
    choose_interface
    export HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo HOROVOD_GLOO_IFACE="$GLOO_SOCKET_IFNAME"
    export HOROVOD_RANK="$SLURM_PROCID" HOROVOD_SIZE="$SLURM_STEP_NUM_TASKS" HOROVOD_HOSTNAME="$SLURMD_NODENAME"
    export HOROVOD_LOCAL_RANK="$SLURM_LOCALID" HOROVOD_LOCAL_SIZE="${SLURM_STEP_TASKS_PER_NODE%%(*}"
    export HOROVOD_CROSS_RANK="$SLURM_NODEID" HOROVOD_CROSS_SIZE="$SLURM_STEP_NUM_NODES"
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
