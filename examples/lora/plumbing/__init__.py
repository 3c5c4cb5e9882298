"""What keeps long jobs alive: locks, whole files, refusals, a record of the run, named hangs.

Nobody has to read this. train.py calls what stands below, and run.slurm what is in job.sh. Without
these calls, and with minimal.py's constants in the place of the flags, train.py still trains.
"""

from .checkpoints import (
    accept,
    check_results,
    load_checkpoint,
    read_checkpoint,
    share_checkpoint,
    write_arrays,
    write_checkpoint,
)
from .checks import name_of_model, note_loss, own_copy
from .files import lock, write
from .launchers import (
    check_connected,
    end_on_ctrl_c,
    fail,
    gather,
    others_waiting,
    patient_group,
    print_errors,
    rank,
    report_failure,
    restart_watchdog,
    set_timeout,
)
from .models import check_output, compile_in_place, fix_summation_order, uncompiled
from .processes import check_gpu, prepare_process, quiet_lightning
from .records import finish, original, plural, print_epoch, print_header, run_id
from .settings import (
    arguments,
    batches_left,
    check_args,
    count_steps,
    learning_rate,
    position,
    set_learning_rate,
    share_batch,
    steps_or_minutes,
)
from .stopping import requested, stop, stop_requested, until_stopped
from .trainer import begin_training, end_training, parts_of
