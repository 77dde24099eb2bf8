"""`forge-run report`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_core.plugins.catalog import Catalog, core_version
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, TEXT, Schema, array, keyed
from forge_kit.tools.outputs import output_file, write_output
from forge_kit.tools.report_sections import ReportSection
from forge_plugin_runs.report.collect import runs_of, sections_of

FORMATS = {"html": ".html", "md": ".md"}
SUFFIXES = (".html", ".htm", ".md", ".markdown")


HEADING = "watch"


def command(argv: list[str]) -> int:
    """Write a report on runs: one HTML file, or Markdown.

    The HTML file needs no network.
    """
    parser = argparse.ArgumentParser("forge-run report", description=command.__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, also of a run that is running")
    add("--out", type=Path, metavar="FILE", help="where to write it (report.html, or report.md)")
    add("--format", choices=list(FORMATS), help="format of the report; by default given by the file's name, else html")
    curves = "draw the logged numbers that match, as in 'moe/*'; repeat it for more (loss, evaluations, speed, …)"
    add("--curves", action="append", default=[], metavar="GLOB", help=curves)
    add("--sections", metavar="A,B", help="only these sections, as in overview,curves")
    add("--title", metavar="TEXT", help="title of the report (the names of the runs)")
    add_json(parser, ": what was written")
    with_examples(
        parser,
        "forge-run report runs/first runs/second",
        "forge-run report runs/* --out compared.md --sections overview,job",
        "forge-run report runs/moe --curves loss --curves 'moe/*'",
    )
    options = parser.parse_args(argv)
    out = options.out or Path("report" + FORMATS[options.format or "html"])
    # Before the runs are read, which may take long
    out = output_file(out, "--out", [FORMATS[options.format]] if options.format else SUFFIXES)
    chosen = tuple(filter(None, (options.sections or "").split(",")))
    size = write_report(
        options.runs, out, form=options.format, curves=options.curves, sections=chosen, title=options.title or ""
    )
    if options.json:
        print_json({"out": out, "bytes": size, "runs": options.runs})
        return ExitCode.FINISHED
    print(f"{out}: {size / 1000:,.0f} kB, {len(options.runs)} run{'s' if len(options.runs) > 1 else ''}")
    return ExitCode.FINISHED


def write_report(
    folders: Sequence[Path | str],
    out: Path | str,
    *,
    form: str | None = None,
    curves: Sequence[str] = (),
    sections: Sequence[str] = (),
    title: str = "",
) -> int:
    """Write a report on runs, and return its size in bytes. The file is replaced when it is whole.

    Args:
        folders: run folders, in the order of their colours.
        out: file to write.
        form: `html` or `md`; None: by the name of the file, `html` where that does not say.
        curves: globs of the numbers to draw; empty: see the section `curves`.
        sections: types of sections; empty: all that are installed and have something to show.
        title: title of the report; empty: the names of the runs.

    Raises:
        JobError: a folder is no run's, a curve, section or format is not known, or the file cannot be written: there is
            one that no report is, for example.
    """
    from forge_plugin_runs.report.markdown import page_markdown
    from forge_plugin_runs.report.page import page_html
    from forge_plugin_runs.report.sections.curves import Curves, check_names

    # Again, as this function is also called from Python
    out = output_file(Path(out), "out")
    form = form or ("md" if out.suffix.lower() in (".md", ".markdown") else "html")
    if form not in FORMATS:
        raise JobError(f"format {form!r} is not known; there are {', '.join(FORMATS)}")
    runs = runs_of([Path(folder) for folder in folders])
    # Before sections are made: an error of a section is only a paragraph of the report
    check_names(curves, runs)

    def make(cls: type[ReportSection]) -> ReportSection:
        return Curves(names=tuple(curves)) if cls is Curves else cls()

    found = sections_of(runs, Catalog.installed(), chosen=sections, make=make)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title, made = title or " · ".join(run.name for run in runs), f"forge-run {core_version()}, {now}"
    page = page_markdown(title, made, found) if form == "md" else page_html(title, made, runs, found)
    # A file name that is not UTF-8 has lone surrogates, which cannot be encoded as such
    write_output(out, "out", content := page.encode(errors="backslashreplace"))
    return len(content)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    return {"": keyed(out=TEXT, bytes=COUNT, runs=array(TEXT))}
