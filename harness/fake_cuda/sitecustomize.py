"""Python imports this by itself where this folder is on PYTHONPATH: switches the stand-in for CUDA on with torch.

Nothing of it is imported without the variable FAKE_CUDA_DEVICES, which the tests alone set: see harness/gpus.py.
"""

import importlib.abc
import importlib.machinery
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as ever, and has `stand_in.install` called as soon as that is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                import stand_in

                stand_in.install(module)

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FAKE_CUDA_DEVICES"):
    sys.meta_path.insert(0, AfterTorch())
if os.environ.get("TRACE_LINES"):
    import trace_lines

    trace_lines.start(os.environ["TRACE_LINES"])
