"""Check a training program from outside, before a long job: python -m verify FOLDER -- FLAGS"""

import argparse
import sys
import time
from pathlib import Path

from verify.checks import LAUNCHERS, ROWS, check

parser = argparse.ArgumentParser(prog="verify", description=__doc__)
parser.add_argument("folder", type=Path, help="the folder with train.py")
parser.add_argument("--launcher", help=f"a command with {{n}} processes, or {', '.join(LAUNCHERS)}")
parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, help="default: all")
end = [*sys.argv, "--"].index("--")
args, flags = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
if not (args.folder / "train.py").is_file():
    parser.error(f"{args.folder} has no train.py")
output = args.folder / "verify-output"
if output.exists() and not (output / "help").exists():
    parser.error(f"{output} is not from verify: move it away")
began, verdicts = time.monotonic(), []
for _, verdict, text in check(args.folder, args.rows, args.launcher, flags):
    print(f"{verdict:12}", text.replace("\n", "\n" + " " * 13), flush=True)
    verdicts.append(verdict)
counts = [f"{verdicts.count(one)} {one}" for one in dict.fromkeys(verdicts)]
print(f"\n{', '.join(counts)} in {(time.monotonic() - began) / 60:.1f} minutes")
sys.exit("FAIL" in verdicts)
