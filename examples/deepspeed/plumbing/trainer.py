"""What Lightning's Trainer leaves out of a resumed run, and what it would do without a word."""

import sys

from .launchers import fail, rank


def begin_training(trainer, progress):
    """Refuse what would be wrong without a word; bring a resumed run to where it was.

    The module calls this in on_train_start, when the checkpoint is loaded.
    """
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging

    if trainer.world_size > 1 and reads_all(trainer.train_dataloader):
        advice = "give it a DistributedSampler"
        fail(f"each process would train with all samples of your DataLoader: {advice}")
    if trainer.world_size > 1 and reads_all(trainer.val_dataloaders):
        wrong = "each process would test with all samples of your DataLoader, which are then summed"
        fail(f"{wrong}: give it sampler=shard, as train.py does")
    if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        wrong = "StochasticWeightAveraging changes the model after its last evaluation"
        fail(f"{wrong}: take WeightAveraging, whose average is what is evaluated")
    if any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):
        wrong = "a callback unfreezes weights that would not be averaged over processes, and that"
        advice = "train them from the start, in a group with a lower learning rate"
        fail(f"{wrong} a resumed run would freeze again: {advice}")
    # The one that writes checkpoint.pt comes last: it saves what the others know after an epoch.
    trainer.callbacks.sort(key=lambda callback: getattr(callback, "FILE_EXTENSION", "") == ".pt")
    if not progress["history"]:
        return
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            step_plateau(config, progress["history"])
    # Otherwise a run that had stopped early would train for one more epoch after each resume.
    stopped = [callback.stopping_reason.value for callback in trainer.early_stopping_callbacks]
    trainer.should_stop = any(stopped)


def reads_all(loaders):
    """Return whether a DataLoader, or one of several in lists and dicts, is not for a process."""
    from torch.utils.data import RandomSampler, SequentialSampler

    for loader in sys.modules["torch"].utils._pytree.tree_leaves(loaders):
        source = getattr(loader, "batch_sampler", None)  # beside one, loader.sampler has no effect
        sampler = getattr(loader if source is None else source, "sampler", None)
        if isinstance(sampler, (RandomSampler, SequentialSampler)):
            return True
    return False


def step_plateau(config, history):
    """Have ReduceLROnPlateau take note of the last epoch: it would have done so after its save."""
    if config.interval != "epoch" or len(history) % config.frequency:
        return
    if config.monitor in history[-1]:
        config.scheduler.step(history[-1][config.monitor])
    elif rank() == 0:
        where = f"add row[{config.monitor!r}] in on_train_epoch_end"
        line = f"ReduceLROnPlateau has not seen {config.monitor} of epoch {len(history)}: {where}"
        print(line, file=sys.stderr)


def end_training(trainer, module, trained):
    """Say why the run has stopped early, and give the module the average of its weights, if any.

    fit does the latter, unless the run was complete before and nothing was `trained`.
    """
    from lightning.pytorch.callbacks import WeightAveraging

    for callback in trainer.early_stopping_callbacks:
        if callback.stopping_reason_message and rank() == 0:
            print(f"EarlyStopping: {callback.stopping_reason_message}")
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging) and not trained:
            callback.on_train_end(trainer, module)


def parts_of(scheduler):
    """Return a scheduler with the schedulers that it is made of, and their own parts."""
    parts = getattr(scheduler, "_schedulers", [])  # of SequentialLR and ChainedScheduler
    return [scheduler, *(each for part in parts for each in parts_of(part))]
