"""Add the fake GPUs to torch: Python imports this file at its start from PYTHONPATH."""

import os

if os.environ.get("FAKE_GPUS") and os.environ.get("CUDA_VISIBLE_DEVICES"):
    import fake_cuda

    fake_cuda.install()
