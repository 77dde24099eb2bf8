"""How two models differ: tensor by tensor, and in what they compute, with a layer of each in memory at a time.

Either may be a published model, a run or a checkpoint. Both are computed by Forge, in float32, from the same tokens;
each continues from its own hidden states, so that differences add up as they do in use.

Shapes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs import frozen
from torch import Tensor, nn

from forge_core.checkpoint.resume import locate
from forge_core.checkpoint.run_folder import TOKENIZER
from forge_core.config.load import MODEL_TABLES, parse_job, to_toml
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import CheckpointError, JobError
from forge_core.contracts.model import Initialises
from forge_core.engine.build import build_bare_model, build_context, build_tokenizer
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.data.tokenizers import begin_of_text
from forge_kit.tools.checkpoints import evaluated_names, stored_tensors
from forge_kit.tools.whole_tensors import read_whole
from forge_plugin_weights.gguf_files import is_gguf
from forge_plugin_weights.importing import CONFIG, PublishedModel, imported_job, match_model, run_of
from forge_plugin_weights.kinds import Part, Shapes
from forge_plugin_weights.matching import check_tensors
from forge_plugin_weights.tables import flattened

if TYPE_CHECKING:
    from forge_plugin_vision import Grid, ImageFormat

CPU = torch.device("cpu")


class Side:
    """One of the two models."""

    job: Job
    """Its job, of which the model counts."""
    shapes: Shapes
    """Of its tensors, by Forge's names."""

    def read(self, name: str) -> Tensor:
        """Returns a tensor, in the dtype that it is stored in."""
        raise NotImplementedError

    def tokenizer(self) -> Tokenizer | None:
        """Returns the model's tokenizer; None if it has none."""
        raise NotImplementedError


class PublishedSide(Side):
    """A published model in a folder, or in a GGUF file."""

    def __init__(self, folder: Path, catalog: Catalog, architecture: str, ignore: Collection[str] = ()) -> None:
        self._source, self._catalog = PublishedModel.open(folder, catalog, architecture, ignore), catalog
        self.job = imported_job(self._source, Path("published"), False, catalog)  # a folder's name may be none of a job
        self.match = match_model(self._source, self.job, catalog)
        check_tensors(self._source.architecture, self.match, self._source.shapes, folder)
        self.places = self._source.places
        self._parts: Mapping[str, Sequence[Part]] = {
            name: [part for part in parts if not part.copy] for name, parts in self.match.parts.items()
        }
        self.shapes = self.match.shapes

    def read(self, name: str) -> Tensor:
        """Returns the tensor, put together from its parts; copies of it in the files are not read."""
        parts = [(part, self._source.places[part.theirs].read()) for part in self._parts[name]]
        tensor = torch.empty(self.shapes[name], dtype=parts[0][1].dtype)
        for part, theirs in parts:
            part.of_ours(tensor).copy_(part.of_theirs(theirs))
        return tensor

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer of the folder as an import would build it."""
        if not (self._source.folder / "tokenizer_config.json").is_file():
            return None
        job = imported_job(self._source, Path("published"), True, self._catalog)
        return build_tokenizer(job, build_context(job, self._catalog, None))


class TrainedSide(Side):
    """The checkpoint of a run."""

    def __init__(self, path: Path, catalog: Catalog, run: Path | None = None) -> None:
        """Args: `run` has the tokenizer, where the checkpoint does not lie in its run folder."""
        try:
            self._checkpoint, manifest = locate(path, "sizes")
        except CheckpointError as error:
            raise JobError(str(error)) from error
        self._catalog, self._run = catalog, run or run_of(path, self._checkpoint)
        self.job = parse_job(manifest["job"], str(self._checkpoint / "manifest.json"), catalog, MODEL_TABLES)
        self._stored = stored_tensors(self._checkpoint)
        self._names = {name.partition(".")[2]: name for name in evaluated_names(self._stored).values()}
        self.shapes = {own: tuple(self._stored[name][0]) for own, name in self._names.items()}

    def read(self, name: str) -> Tensor:
        """Returns the tensor that is evaluated: the average where the checkpoint has one."""
        return read_whole(self._checkpoint, [self._names[name]], self._stored)[self._names[name]]

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer in the run folder; None for a checkpoint that lies elsewhere."""
        if self._run is None or not (self._run / TOKENIZER).is_dir():
            return None
        return build_tokenizer(self.job, build_context(self.job, self._catalog, self._run))


def open_side(path: Path, catalog: Catalog, architecture: str = "", ignore: Collection[str] = ()) -> Side:
    """Returns the model in a folder: a published one if it has a `config.json`, else a run's or checkpoint's.

    A GGUF file is a published model, too.

    Args:
        path: the folder.
        catalog: which architectures there are.
        architecture: of a published model, in place of the one that its files name.
        ignore: keys of its `config.json` that mean nothing.
    """
    if (path / CONFIG).is_file() or is_gguf(path):
        return PublishedSide(path, catalog, architecture, ignore)
    return TrainedSide(path, catalog)


@frozen
class TensorDifference:
    """How a tensor differs."""

    name: str
    equal: bool
    """Whether all numbers are the same, in whatever dtype."""
    largest: float
    """The largest difference of two numbers, as a share of the largest one in the first model."""


@frozen
class LogitDifference:
    """How what the models compute differs."""

    layers: Mapping[str, float]
    """By layer, the largest difference of hidden states behind it, as a share of the largest one."""
    logits: float
    """The largest difference of two logits."""
    divergence: float
    """Mean over the positions of the Kullback-Leibler divergence of the second's probabilities from the first's."""
    likeliest: float
    """Share of the positions at which both find the same token likeliest."""

    def lines(self, tokens: int) -> Iterator[str]:
        """Yields the lines that a user reads; `tokens` were compared, in addition to an image's positions."""
        for name, difference in self.layers.items():
            yield f"layer {name}: hidden states differ by {difference:.3g} of the largest"
        yield f"logits: largest difference {self.logits:.3g}, divergence {self.divergence:.3g} nats a token"
        yield f"likeliest token: the same at {self.likeliest:.1%} of {tokens} positions"


def compare_tensors(one: Side, other: Side) -> Iterator[TensorDifference]:
    """Yields how each tensor differs, one in memory at a time.

    Raises:
        JobError: the models do not have the same tensors; lists names and shapes.
    """
    names = sorted({*one.shapes, *other.shapes})
    unlike = [name for name in names if one.shapes.get(name) != other.shapes.get(name)]
    if unlike:
        shapes = ((name, one.shapes.get(name, "missing"), other.shapes.get(name, "missing")) for name in unlike[:5])
        shown = "; ".join(f"{name} {first} / {second}" for name, first, second in shapes)
        raise JobError(f"the models do not have the same tensors: {shown}")
    for name in names:
        # The two may be stored in different dtypes.
        first, second = (side.read(name).float() for side in (one, other))
        difference = (first - second).abs().max().item() if first.numel() else 0.0
        scale = max(first.abs().max().item(), 1e-30) if first.numel() else 1.0  # above 0 for tensors of zeros
        yield TensorDifference(name, torch.equal(first, second), difference / scale)


def model_changes(one: Side, other: Side, catalog: Catalog) -> Sequence[str]:
    """Returns the keys of `[model]` that differ, with both values."""
    first, second = (flattened(to_toml(side.job.model, catalog)) for side in (one, other))
    paths = sorted(path for path in {*first, *second} if first.get(path) != second.get(path))
    return [f"model.{path}: {first.get(path)!r} / {second.get(path)!r}" for path in paths]


def random_batch(side: Side, tokens: int) -> Mapping[str, Tensor]:
    """Returns a row of random tokens, after a random image if the model sees images."""
    generator = torch.Generator().manual_seed(0)  # the same tokens in every comparison
    model: Any = side.job.model
    ids = torch.randint(side.shapes["embedding.weight"][0], (1, tokens), generator=generator)
    if not hasattr(model, "image_input"):
        return {"input_ids": ids}
    from forge_plugin_vision import GRIDS, IMAGE, PATCHES

    seen = model.image_input()
    grid, own = random_image(seen.format, generator)
    patches = torch.zeros(1, max(seen.patches_per_sequence, grid.patches), seen.format.values, dtype=torch.uint8)
    patches[:, : grid.patches] = own
    grids = torch.zeros(1, seen.images_per_sequence, 3, dtype=torch.int64)
    grids[0, 0] = torch.tensor(grid)
    image = torch.full((1, seen.positions(grid)), IMAGE)
    return {"input_ids": torch.cat([image, ids], 1), PATCHES: patches, GRIDS: grids}


def text_batch(path: Path, sides: Sequence[Side]) -> tuple[Mapping[str, Tensor], Tensor]:
    """Returns the lines of a file, a row each, by the first tokenizer that there is, and which positions are theirs.

    Returns:
        The batch, and (B, S) bool: false where a shorter row was filled up.

    Raises:
        JobError: the file cannot be read or has no text, neither model has a tokenizer, or they see images.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise JobError(f"{path} has no text; a line is a prompt")
    if any(hasattr(side.job.model, "image_input") or "embedding.weight" not in side.shapes for side in sides):
        raise JobError(
            "prompts are texts; without them, models that see images are compared on an image and random tokens"
        )
    tokenizer = next((known for side in sides if (known := side.tokenizer()) is not None), None)
    if tokenizer is None:
        raise JobError("neither model has a tokenizer, which prompts need; without them, random tokens are taken")
    rows = [[*begin_of_text(tokenizer), *tokenizer.encode(line)] for line in lines]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for number, row in enumerate(rows):  # filled up behind, where what comes before does not see it
        ids[number, : len(row)], real[number, : len(row)] = torch.tensor(row), True
    return {"input_ids": ids}, real


def random_image(form: ImageFormat, generator: torch.Generator) -> tuple[Grid, Tensor]:
    """Returns the grid of an image, and its random patches (1, P, V)."""
    from forge_plugin_vision import Grid

    grid = form.largest or Grid(1, 2 * form.multiple, 2 * form.multiple)
    return grid, torch.randint(256, (1, grid.patches, form.values), generator=generator, dtype=torch.uint8)


@torch.no_grad()
def compare_features(one: Side, other: Side, catalog: Catalog) -> float:
    """Returns the largest difference of two towers' features of a random image, as a share of the largest of them."""
    first, second = (_features(side, catalog) for side in (one, other))
    return ((first - second).abs().max() / first.abs().max().clamp(min=1e-30)).item()


def _features(side: Side, catalog: Catalog) -> Tensor:
    from forge_plugin_vision import GRIDS, PATCHES

    model: Any = side.job.model
    grid, patches = random_image(model.vision.encoder.image_format(), torch.Generator().manual_seed(0))
    return _LayerByLayer(side, {PATCHES: patches, GRIDS: torch.tensor([[grid]])}, catalog).features()


@torch.no_grad()
def compare_logits(
    one: Side, other: Side, batch: Mapping[str, Tensor], catalog: Catalog, real: Tensor | None = None
) -> LogitDifference:
    """Returns how the two models' hidden states and logits differ.

    Args:
        one: a model.
        other: the model to compare with it.
        batch: see `random_batch` and `text_batch`.
        catalog: which components there are.
        real: (B, S) bool, the positions that count; by default all.
    """
    real = torch.ones_like(batch["input_ids"], dtype=torch.bool) if real is None else real
    runs = [_LayerByLayer(side, batch, catalog) for side in (one, other)]
    layers: dict[str, float] = {}
    # Both models advance together, so that only one layer of each is in memory.
    for (name, states), (_, others) in zip(*(run.hidden_states() for run in runs), strict=True):
        first, second = states[real], others[real]
        layers[name] = ((first - second).abs().max() / first.abs().max().clamp(min=1e-30)).item()
    first, second = (run.logits()[real] for run in runs)
    probabilities, others = first.log_softmax(-1), second.log_softmax(-1)
    divergence = (probabilities.exp() * (probabilities - others)).sum(-1).mean().item()
    same = (first.argmax(-1) == second.argmax(-1)).double().mean().item()
    # Rounding may make the divergence of equal models slightly negative.
    return LogitDifference(layers, (first - second).abs().max().item(), max(divergence, 0.0), same)


class _LayerByLayer:
    """A model of which the parts are loaded when they are needed, and dropped afterwards."""

    def __init__(self, side: Side, batch: Mapping[str, Tensor], catalog: Catalog) -> None:
        # In float32 on the CPU, however it was trained: what differs is then due to the weights
        job = attrs.evolve(side.job, parallel={}, train=attrs.evolve(side.job.train, precision="fp32", device="cpu"))
        self._side, self._given = side, batch
        # A run's model may have as many rows as its tokenizer has tokens; a published one says how many it has
        tokenizer = side.tokenizer() if isinstance(side, TrainedSide) else None
        context = attrs.evolve(build_context(job, catalog, None), tokenizer=tokenizer)
        self._model: Any = build_bare_model(job, context)[0].eval()
        self._other_names = dict(self._model.tied_parameters())  # stored under one name
        self._carry: Any = ()

    def hidden_states(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the first tensor behind each layer, by the layer's name."""
        model, batch = self._model, self._given
        first, _ = model.ends() or (["embedding"], [])
        self._load(first)
        batch = model.prepare(batch)
        self._carry, self._batch = model.embed(batch), batch
        self._drop(first)
        for name in model.layers:
            own = [f"layers.{name}"]
            self._load(own)
            self._carry = model.get_submodule(own[0])(self._carry, batch)
            self._drop(own)
            yield name, self._carry[0]

    def features(self) -> Tensor:
        """Returns what a tower alone makes of the batch's image: (1, P, W)."""
        self._load(["vision"])
        features: Tensor = self._model.features(self._given)
        self._drop(["vision"])
        return features

    def logits(self) -> Tensor:
        """Returns the logits (B, S, V), after all layers."""
        model = self._model
        _, last = model.ends() or ([], ["norm", "head"])
        self._load(last)
        hidden = model.finish(self._carry, self._batch)
        logits: Tensor = model.head.logits(hidden)
        self._drop(last)
        return logits.float()

    def _load(self, parts: Sequence[str]) -> None:
        for part in parts:
            module: nn.Module = self._model.get_submodule(part)
            module.to_empty(device=CPU)
            # Buffers that are computed, such as frequencies, are in no file.
            for inner in module.modules():
                if isinstance(inner, Initialises):
                    inner.init_buffers(CPU)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                whole = self._other_names.get(f"{part}.{name}", f"{part}.{name}")
                if whole in self._side.shapes:  # other buffers are no weights, and have been made
                    tensor.copy_(self._side.read(whole))

    def _drop(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._model.get_submodule(part).to("meta")  # frees its memory
