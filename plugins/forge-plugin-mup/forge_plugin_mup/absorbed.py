"""Factors on what parameters compute: of depth, of attention scores, of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import evolve

from forge_core import ForgeError, JobError, Problem
from forge_core.contracts.model import Model
from forge_plugin_mup.shapes import Comparison


@runtime_checkable
class NamesStreamWriters(Protocol):
    """A model whose residual blocks can have a factor: without it, a base of another depth is refused."""

    def stream_writers(self) -> Sequence[str]:
        """Returns names of parameters so that what each block adds to the residual stream is proportional to them.

        One matrix of each path, with its bias: the last one.
        """
        ...


@runtime_checkable
class NamesScoreWeights(Protocol):
    """A model with attention whose heads may be wider than in the base."""

    def score_weights(self) -> Sequence[tuple[Sequence[str], int, float]]:
        """Returns for each attention the parameters that scores are proportional to, of queries say.

        With them the width of a head, and the factor on scores. No names if there are no such parameters.
        """
        ...


def absorb(compared: Comparison, model: Model, base: Model) -> Comparison:
    """Returns the comparison with the factors that depth and the width of heads put on parameters.

    Raises:
        JobError: the model does not name the parameters that could absorb one.
    """
    places = dict(compared.places)
    for name, factor in (*_of_depth(compared.depth, model), *_of_scores(compared, model, base)):
        places[name] = evolve(places[name], absorbed=places[name].absorbed * factor)
    return evolve(compared, places=places)


def _of_depth(depth: float, model: Model) -> Iterator[tuple[str, float]]:
    """Blocks add 1 / depth as much, so that all layers together move the stream as in the base."""
    if depth == 1:
        return
    if not isinstance(model, NamesStreamWriters):
        message = f"{type(model).__name__} does not name the parameters that write into the residual stream"
        raise JobError([Problem("", f"{message}, by a method `stream_writers`; give the base as many layers")])
    try:
        yield from ((name, 1 / depth) for name in model.stream_writers())
    except ForgeError as error:
        raise JobError([Problem("", f"{error}; give the base as many layers")]) from error


def _of_scores(compared: Comparison, model: Model, base: Model) -> Iterator[tuple[str, float]]:
    """Scores are a sum over a head's features, which agree once trained: 1 / E in place of 1 / sqrt(E)."""
    if not (isinstance(model, NamesScoreWeights) and isinstance(base, NamesScoreWeights)):
        return
    # By names, since layers of the base are fewer: a twin is a module of the base and a key
    modules = {module: name for name, module in base.named_modules()}
    known = {frozenset(names): sizes for names, *sizes in base.score_weights()}
    widths = {sizes[0] for sizes in known.values()}
    for names, width, factor in model.score_weights():
        if not names:
            if widths != {width}:
                message = f"has heads of width {sorted(widths)[0]}, and the model {width}, whose scores are of queries"
                hint = "normalised without a plain gain; keep the width of heads"
                raise JobError([Problem("attention", f"{message} {hint}")])
            continue
        twins = [compared.twins[name] for name in names]
        base_width, base_factor = known[frozenset(f"{modules[module]}.{key}" for module, key in twins)]
        # Relative to the base's: its factor times width, so that a job may have set another one
        ratio = base_factor * base_width / (factor * width)
        if ratio != 1:
            yield from ((name, ratio) for name in names)


def logit_problems(component: Any, base: Any, model: Model, compared: Comparison) -> Iterator[Problem]:
    """Checks the factor on logits where embedding and head are one table, which cannot absorb it."""
    tied = [name for other, name in model.tied_parameters().items() if other.startswith("head.")]
    if not tied:
        return
    ratio = compared.places[tied[0]].output_ratio
    ours, theirs = getattr(component, "logit_scale", None), getattr(base, "logit_scale", None)
    if ours is None or theirs is None:
        if ratio != 1:
            yield Problem("", "the head is the embedding's table, and logits have no factor; untie them")
        return
    wanted = theirs / ratio
    if abs(ours - wanted) > 1e-6 * wanted:
        message = f"the head is the embedding's table, so that logits need a factor: set model.logit_scale = {wanted:g}"
        yield Problem("logit_scale", f"{message} and base.logit_scale = {theirs:g}, or untie them")
