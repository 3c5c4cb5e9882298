"""Open a notebook in JupyterLab as a user does, with a real browser without a window, and run its cells.

It is a program, since the browser has to be where the address means something: at the user's end of an ssh tunnel,
inside the lab. Playwright drives the browser, which is Debian's Chromium.
"""

import shutil
import sys
from urllib.parse import urlsplit

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
# Beside each cell stands [ ]: before it is run, [*]: while it runs or waits, then its number.
ALL_DONE = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].every(e => /[0-9]/.test(e.innerText))"


def main(url: str, notebook: str) -> None:
    """Open, run all cells and save; then say `done`, and stay as long as standard input is open."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(300_000)
        page.goto(urlsplit(url)._replace(path=f"/lab/tree/{notebook}").geturl())
        page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for()
        page.locator(".jp-KernelName", has_text="Python 3").wait_for()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_function(ALL_DONE, timeout=300_000)
        # A cell's number may come before its last output. After all output the kernel says that it is idle.
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        page.keyboard.press("Control+s")
        print("done", flush=True)
        sys.stdin.read()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
