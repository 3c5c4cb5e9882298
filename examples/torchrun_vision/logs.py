"""Experiment loggers, for --log-to: TensorBoard, MLflow or Weights & Biases.

Their files lie in the output folder.
"""

import shutil
from importlib.util import find_spec

import torch.distributed as dist

NAMES = ("tensorboard", "mlflow", "wandb")


def check_args(parser, args):
    """Refuse a logger whose package is not installed."""
    if args.log_to and find_spec(args.log_to) is None:
        wrong = f"--log-to {args.log_to} needs a package that is not installed"
        parser.error(f"{wrong}: pip install {args.log_to}")


def open_log(args, history):
    """Return a function that logs a row of metrics.csv for --log-to, on rank 0.

    The files are written anew from the history, as metrics.csv is: after a resume no row is there
    twice, and none is missing.
    """
    if not args.log_to or dist.get_rank() > 0:
        return lambda row: None
    folder = args.output_dir / args.log_to
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if args.log_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder))

        def log(row):
            for name, value in row.items():
                writer.add_scalar(name, value, row["epoch"])
            writer.flush()
    elif args.log_to == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        mlflow.start_run()

        def log(row):
            mlflow.log_metrics(row, step=row["epoch"])
            if row["epoch"] == args.epochs:
                mlflow.end_run()
    else:
        import wandb

        run = wandb.init(project="torchrun_vision", mode="offline", dir=str(folder))

        def log(row):
            run.log(row, step=row["epoch"])
            if row["epoch"] == args.epochs:
                run.finish()

    for row in history:
        log(row)
    return log
