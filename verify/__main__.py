"""Check a training program from outside, before a long job: python -m verify FOLDER -- FLAGS"""

import argparse
import sys
import time

from verify import LAUNCHERS, ROWS, Refused, check


def matrix():
    """Return a table in Markdown: which rows there are for which launcher."""
    lines = [["row", "", *LAUNCHERS], ["---"] * (2 + len(LAUNCHERS))]
    for name, (what, *_) in ROWS.items():
        cells = ["no" if name in without else "yes" for *_, without in LAUNCHERS.values()]
        lines.append([f"`{name}`", what, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main():
    """Read the command line, check, and print the table; the status is 1 if a row failed."""
    words = [*sys.argv[1:], "--"]
    end = words.index("--")
    parser = argparse.ArgumentParser(prog="verify", description=__doc__)
    parser.add_argument("folder", nargs="?", help="the folder with train.py")
    launchers = f"{', '.join(LAUNCHERS)}, or a command in which {{n}} is the number of processes"
    parser.add_argument("--launcher", help=launchers)
    parser.add_argument("--rows", nargs="+", default=(), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--matrix", action="store_true", help="print which launcher has which rows")
    args = parser.parse_args(words[:end])
    if args.matrix:
        return print(matrix(), end="")
    if not args.folder:
        parser.error("which folder?")
    began, verdicts = time.monotonic(), []

    def tell(line):
        print(f"      ({time.monotonic() - began:.0f} s) {line}", file=sys.stderr, flush=True)

    try:
        for name, verdict, text in check(
            args.folder, args.rows, args.launcher, words[end + 1 : -1], tell
        ):
            text = text.replace("\n", "\n" + " " * 13)
            print(f"{verdict:12} {name} ({ROWS[name][0]}): {text}", flush=True)
            verdicts.append(verdict)
    except Refused as error:
        print(f"verify: error: {error}", file=sys.stderr)
        sys.exit(2)
    counts = [f"{verdicts.count(one)} {one}" for one in dict.fromkeys(verdicts)]
    print(f"\n{', '.join(counts)} in {(time.monotonic() - began) / 60:.1f} minutes")
    sys.exit("FAIL" in verdicts)


if __name__ == "__main__":
    main()
