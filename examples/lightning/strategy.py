"""How Lightning joins the processes, wraps the model and writes checkpoints."""

from pathlib import Path
from types import SimpleNamespace

from lightning.pytorch.strategies import DDPStrategy

import longrun


class WholeFiles(DDPStrategy):
    """DDP; longrun.py writes the checkpoint as a whole or not at all, and metrics.csv with it."""

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        """Write what the Trainer has collected, a dict; it calls this in all processes."""
        if Path(filepath).name != "checkpoint.pt":  # of a ModelCheckpoint that you have added
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        module = self.lightning_module
        longrun.check([w for w in module.parameters() if w.requires_grad], module.progress)
        # longrun.py asks each part for its state_dict(), and here the parts are the states
        parts = {n: SimpleNamespace(state_dict=lambda part=p: part) for n, p in checkpoint.items()}
        return longrun.save_checkpoint(module.args, parts, module.progress)
