"""Record which pieces of an example's Python are executed: for harness/gpu_lines.py.

A line is too coarse, since `"nccl" if device.type == "cuda" else "gloo"` has a GPU's piece and another. So the position
of each instruction is recorded, as the compiler has noted it.
"""

import json
import os
import sys
import threading
import uuid

SEEN = {}  # code object: the offsets of the instructions that were executed


def start(folder):
    """Record what files of the current folder execute, in this process; `write` leaves it in `folder`."""
    here = os.getcwd() + os.sep

    def local(frame, event, _):
        if event == "opcode":
            SEEN[frame.f_code].add(frame.f_lasti)
        return local

    ours = {}

    def trace(frame, event, _):
        code = frame.f_code
        name = code.co_filename
        if name not in ours:
            ours[name] = os.path.dirname(os.path.abspath(name)) + os.sep == here
        if not ours[name]:
            return None
        SEEN.setdefault(code, set())
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    def write():
        files = {}
        for code, offsets in list(SEEN.items()):
            positions = list(code.co_positions())
            lines = files.setdefault(os.path.basename(code.co_filename), set())
            lines.update(positions[offset // 2] for offset in list(offsets))
        if files:
            name = os.path.join(folder, f"lines-{os.getpid()}-{uuid.uuid4().hex[:6]}.json")
            with open(f"{name}.part", "w") as file:
                json.dump({name: sorted(map(list, found), key=str) for name, found in files.items()}, file)
            os.replace(f"{name}.part", name)  # whoever started this process may end it meanwhile

    def exit_now(status, real=os._exit):
        write()
        real(status)

    import atexit

    atexit.register(write)
    os._exit = exit_now
    threading.settrace(trace)
    sys.settrace(trace)
