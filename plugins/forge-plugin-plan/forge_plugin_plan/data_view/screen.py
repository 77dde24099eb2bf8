"""The view on a terminal, or as plain text: any width, with or without colour."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from forge_kit.data.data_files import left_out_note
from forge_kit.data.job_data import Passage
from forge_kit.tools.tables import columns
from forge_plugin_plan.data_view.samples import Fill, Stretch
from forge_plugin_plan.data_view.view import Lengths, ShownSample, SourceView, View

LEARNED, IGNORED, SPECIAL, QUIET = "green", "dim", "cyan", "dim"
OPEN, CLOSE = "⟪", "⟫"
"""Around tokens that are not learned, where there is no colour to tell them by."""
BAR = 24
"""Longest bar of a histogram."""


def show(view: View) -> None:
    """Print the view to standard output."""
    # Without markup and emoji: data may have text such as [bold] and :smile:
    console = Console(highlight=False, markup=False, emoji=False)
    colour = console.is_terminal and not console.no_color
    for source in view.sources:
        # With one source, its share is the fill that is printed below
        _show_source(console, source, view.measured if len(view.sources) > 1 else 0)
    _show_fill(console, view)
    for sample in view.samples:
        console.print()
        _show_sample(console, view, sample, colour)
    console.print(Text(_legend(colour), style=QUIET))
    if view.documents:
        _show_documents(console, view)


def _show_source(console: Console, source: SourceView, measured: int) -> None:
    """Print a source; with `measured` samples of several sources, also the share of it that is learned."""
    console.print(Text.assemble((f"source {source.name}", "bold"), f"  {source.type}"))
    for line in source_lines(source):
        console.print(f"  {line}")
    if measured and source.learned is not None:
        console.print(f"  learned {source.learned:.2%} of its positions among {measured:,} samples")
    if source.lengths is not None:
        # On a narrow terminal, the bar leaves room for the bound and the share
        for line in histogram(source.lengths, min(BAR, max(8, console.width - 36))):
            console.print(f"    {line}")


def source_lines(source: SourceView) -> Iterator[str]:
    """Yields the counts of a source."""
    if source.sequences is None:
        yield "a stream: its length is not known"
    else:
        parts = [(source.documents, "documents"), (source.tokens, "tokens"), (source.sequences, "sequences")]
        yield ", ".join(f"{count:,} {what}" for count, what in parts if count is not None)
    if note := left_out_note(source.left_out):
        yield note
    if source.rows:
        yield source.rows
    if source.description:
        yield source.description  # also describes the held-out part
    elif source.held_out is not None:
        yield f"held out: {source.held_out:,} sequences"
    epochs = "" if source.epochs is None else f", {source.epochs:.3g} epochs"
    yield f"{source.share:.1%} of the run's samples: {source.draws:,.0f}{epochs}"
    if (lengths := source.lengths) is not None:
        sampled = (
            f" (of {lengths.documents:,} documents, taken evenly)" if lengths.documents != source.documents else ""
        )
        yield f"tokens per document: median {lengths.median:,}, longest {lengths.longest:,}{sampled}"


def histogram(lengths: Lengths, width: int) -> Iterator[str]:
    """Yields a line for each bin, with a bar of at most `width`."""
    most = max(count for _, count in lengths.bins)
    label = len(f"{lengths.bins[-1][0]:,}")
    for bound, count in lengths.bins:
        bar = "█" * round(width * count / most)
        yield f"up to {bound:>{label},} {bar or '·'} {count / lengths.documents:.1%}"


def _show_fill(console: Console, view: View) -> None:
    fill, train = view.fill, view.data.job.train
    console.print(Text(f"fill, over {view.measured:,} samples from step {view.step} on", style="bold"))
    console.print(f"  {_fill_text(fill)}")
    console.print(f"  {train.batch_size(view.step):,} samples a step, {train.seq_len:,} positions a sample")
    if not view.shifted:
        console.print("  some labels are not the next input: the dataset has its own targets, or shifts them wrongly")


def _fill_text(fill: Fill) -> str:
    padding = f", padding {fill.padding / fill.positions:.2%}" if fill.padding else ""
    ignored = (fill.ignored - fill.padding) / fill.positions
    return f"learned {fill.learned / fill.positions:.2%} of positions, without a label {ignored:.2%}{padding}"


def _show_sample(console: Console, view: View, shown: ShownSample, colour: bool) -> None:
    console.print(Text.assemble((f"sample {shown.number} of step {view.step}", "bold"), f": {shown.where}"))
    console.print(f"  {_fill_text(shown.sample.fill)}")
    for name, shape in shown.sample.shapes.items():
        console.print(f"  {name}: {' x '.join(map(str, shape)) or 'a number'}")
    line, images = Text(), iter(shown.images)
    document: int | None = 0
    # The first document has a heading only where its place follows
    known = {number: passage for number, passage in enumerate(shown.passages) if passage.origin}
    if 0 in known:
        document = None
    for run in shown.runs:
        if run.document != document:
            if line:
                console.print(line)
            title = "padding" if run.kind == "padding" else f"document {run.document + 1}"
            console.print(Rule(Text(title, style=QUIET), style=QUIET, align="left"))
            if run.document in known:
                # Not in the heading, which a terminal cuts, and not wrapped
                console.print(Text(_from(known[run.document]), style=QUIET), soft_wrap=True)
            line, document = Text(), run.document
        line.append_text(_run_text(view, run, colour, next(images) if run.kind == "image" else ""))
    console.print(line)
    if shown.left_out:
        learned = f"{shown.left_out_learned:,} of them learned"
        console.print(Text(f"… {shown.left_out:,} more tokens, {learned}; --tokens 0 shows all", style=QUIET))


def _from(passage: Passage) -> str:
    """Returns where a passage comes from; its origin is data, and may have anything in it."""
    # A line break of an id would be the next row
    known = visible(str(passage.origin)).replace("\n", "\\n")
    place = known if passage.origin else f"document {passage.number:,} of the source"
    return f"{place}, from token {passage.token:,}" if passage.token else place


def _show_documents(console: Console, view: View) -> None:
    console.print()
    console.print(Text(f"documents of step {view.step}", style="bold"))
    head = ["sample", "position", "tokens", "document"]
    rows = [
        [str(number), f"{passage.position:,}", f"{passage.tokens:,}", _from(passage)]
        for number, passages in view.documents.items()
        for passage in passages
    ]
    # Not wrapped: a line is one document, also for other programs
    console.print(columns([head, *rows]), soft_wrap=True)


def _run_text(view: View, run: Stretch, colour: bool, image: str) -> Text:
    if run.kind == "padding":
        return Text(f"{len(run.ids):,} positions", style=QUIET)
    style = LEARNED if run.learned else IGNORED
    pieces = [(image, True)] if image else view.decoder.pieces(run.ids)
    text = Text()
    for content, special in pieces:
        # Special tokens that are learned stay green: the colour marks learned tokens
        text.append(visible(content), style=f"{style} {SPECIAL}" if special and not run.learned else style)
    # Placeholders of images need no marks: nothing of an image is learned.
    return text if colour or run.learned or image else Text.assemble(OPEN, text, CLOSE)


def visible(text: str) -> str:
    """The text with control characters spelt out: data may hold the escape sequences of a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def _legend(colour: bool) -> str:
    if colour:
        return "\ngreen: learned, as the label of the position before; dim: not learned"
    return f"\n{OPEN}…{CLOSE}: not learned; all else is learned, as the label of the position before"
