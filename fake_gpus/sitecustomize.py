"""Python imports this file when it starts, if this folder is in PYTHONPATH: it adds the fake GPUs to torch."""

import os

if os.environ.get("FAKE_GPUS") and os.environ.get("CUDA_VISIBLE_DEVICES"):
    import fake_cuda

    fake_cuda.install()
