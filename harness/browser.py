"""Open a notebook in JupyterLab as a user does, with a real browser without a window, and run its cells.

It is a program, since the browser has to be where the address means something: inside the lab, at the user's end of an
ssh tunnel, or on the node itself. Playwright drives the browser, which is Debian's Chromium.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
# Beside each cell stands [ ]: before it is run, [*]: while it runs or waits, then its number.
ALL_DONE = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].every(e => /[0-9]/.test(e.innerText))"


def address(given: str) -> str:
    """Return an address as it is given, or the first with a token in the file that is named."""
    if "://" in given:
        return given
    try:
        found = re.search(r"https?://\S+[?]token=\S+", Path(given).read_text())
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"browser.py: error: cannot read {given}: {error}")
    if not found:
        sys.exit(f"browser.py: error: {given} has no address with a token: name the job's connect-JOBID.txt")
    return found[0]


def main() -> None:
    """Open, run all cells, save and take a picture; then say `done`, and stay as long as standard input is open."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="with the token; or connect-JOBID.txt, since all users see what `ps` shows")
    parser.add_argument("notebook", help="its path in JupyterLab's file browser")
    parser.add_argument("--until", help="do not wait for the last cell but for this text in an output, and do not save")
    parser.add_argument("--picture", type=Path, help="write a PNG of the page")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        # High enough for all cells: those that are out of sight are not in the page
        page = browser.new_page(viewport={"width": 1100, "height": 8000}, ignore_https_errors=True)
        page.set_default_timeout(300_000)
        at = urlsplit(address(args.url))
        # `reset` closes what the same user has left open
        page.goto(at._replace(path=f"/lab/tree/{args.notebook}", query=f"{at.query}&reset").geturl())
        page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for()
        page.locator(".jp-KernelName", has_text="Python 3").wait_for()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        if args.until:
            page.locator(".jp-OutputArea-output", has_text=args.until).first.wait_for()
        else:
            page.wait_for_function(ALL_DONE, timeout=300_000)
            # A cell's number may come before its last output. After all output the kernel says that it is idle.
            page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
            page.keyboard.press("Control+s")
        if args.picture:
            page.set_viewport_size({"width": 1100, "height": 760})
            for figure in page.locator(".jp-OutputArea-output img").all()[:1]:
                figure.scroll_into_view_if_needed()
            page.screenshot(path=args.picture)
        print("done", flush=True)
        sys.stdin.read()
        browser.close()


if __name__ == "__main__":
    main()
