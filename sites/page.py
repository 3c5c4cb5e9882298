"""Write sites/systems.md, the page of all systems, from their files."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from sites.systems import COLUMNS, Page, SitesError, System, all_systems, load, made

PAGE = Path(__file__).resolve().parent / "systems.md"
OTHERS = Path(__file__).resolve().parent / "not_in_the_sheet.toml"
HEAD = """\
# Lines for known clusters

`python -m sites page` has written this page from `sites/systems/*.toml`: change these, not the page.
[README.md](README.md) says how to read it, and how the lines come into a `run.slurm`. **Nobody of this project has run
the examples on these systems.**
"""


def anchor(title: str) -> str:
    """Return the address of a section on its page, as GitHub makes it."""
    kept = (one for one in title.lower() if one.isalnum() or one in " -_")
    return "".join(kept).replace(" ", "-")


def links(names: list[str], pages: Mapping[str, Page]) -> str:
    """Return links to pages, each with the date of its last change."""
    return "; ".join(f"[{pages[name].title}][{name}], {pages[name].date}" for name in names)


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def overview(systems: Mapping[str, System]) -> Iterator[str]:
    """Yield the lines of the table of all systems."""
    yield row("system", "file", *COLUMNS.values())
    yield "|" + "---|" * (len(COLUMNS) + 2)
    for name, system in systems.items():
        cells = (system.row[column] for column in COLUMNS)
        yield row(f"[{system.name}](#{anchor(system.title)})", f"[{name}](systems/{name}.toml)", *cells)


def section(system: System) -> Iterator[str]:
    """Yield the lines of a system's section, but for the addresses of its pages."""
    yield f"## {system.title}"
    yield ""
    if system.about:
        source = f" ({links(system.about_sources, system.pages)})" if system.about_sources else ""
        yield f"{system.about}{source}"
        yield ""
    yield row("fact", "line to write", f"source, read {system.read}")
    yield "|---|---|---|"
    for name, fact in system.facts.items():
        later = f" (read {fact.read})" if fact.read else ""
        yield row(name, fact.text, links(fact.sources, system.pages) + later)
    yield ""


def addresses(pages: Mapping[str, Page], known: dict[str, Page]) -> Iterator[str]:
    """Yield the addresses of pages, once on the page; raises SitesError if a page has two dates."""
    for name, page in pages.items():
        if known.get(name, page) != page:
            raise SitesError(f"pages.{name} is not the same in all files of systems")
        if name not in known:
            yield f"[{name}]: {page.url}"
        known[name] = page


def text() -> str:
    """Return the page; raises SitesError if a file lacks what it needs."""
    systems = all_systems()
    for name, system in systems.items():
        if list(system.row) != list(COLUMNS):
            raise SitesError(f"{name}.toml: row must have {', '.join(COLUMNS)}, in this order")
    known: dict[str, Page] = {}
    lines = [HEAD, *overview(systems), ""]
    for system in systems.values():
        lines += section(system)
        lines += [*addresses(system.pages, known), ""]
    others = load(OTHERS)
    pages = {name: made(Page, page, f"{OTHERS}: pages.{name}") for name, page in others["pages"].items()}
    lines += ["## Not in the sheet", "", others["about"], ""]
    lines += [row("system", "what was read", f"source, read {others['read']}"), "|---|---|---|"]
    lines += [row(one["name"], one["text"], links(one["sources"], pages)) for one in others["systems"]]
    return "\n".join([*lines, "", *addresses(pages, known)]) + "\n"
