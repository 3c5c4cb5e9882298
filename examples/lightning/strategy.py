"""How Lightning joins the processes, wraps the model in DDP, and writes checkpoints."""

from pathlib import Path
from types import SimpleNamespace

from lightning.pytorch.strategies import DDPStrategy

import longrun


class WholeFiles(DDPStrategy):
    """DDP; longrun.py writes the checkpoint as a whole or not at all, and metrics.csv with it."""

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        """Write the Trainer's checkpoint, a dict; the Trainer calls this in all processes."""
        if Path(filepath).name != "checkpoint.pt":  # of a ModelCheckpoint that you have added
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        module = self.lightning_module
        longrun.check([w for w in module.parameters() if w.requires_grad], module.progress)
        # longrun.py calls state_dict() of each part; here the parts already are state dicts
        parts = {n: SimpleNamespace(state_dict=lambda part=p: part) for n, p in checkpoint.items()}
        return longrun.save_checkpoint(module.args, parts, module.progress)
