"""Python imports this by itself where this folder is on PYTHONPATH: switches the fake GPUs on with torch.

Nothing of it is imported without the variable FAKE_GPUS, which the tests alone set: see __init__.py.
"""

import importlib.abc
import importlib.machinery
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as ever, and has `fake_driver.install` called as soon as that is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                import fake_driver

                fake_driver.install(module)

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FAKE_GPUS"):
    sys.meta_path.insert(0, AfterTorch())
