"""Trained models, for Python: logits of token ids, and what commands of plugins do with a model."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import attrs
import torch
from attrs import field, frozen
from torch import Tensor

from forge_core.checkpoint.resume import locate
from forge_core.checkpoint.run_diff import check_tokenizer
from forge_core.checkpoint.run_folder import TOKENIZER, run_folder
from forge_core.config.load import MODEL_TABLES, parse_job
from forge_core.config.tree import Overrides
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ForgeError, JobError, did_you_mean
from forge_core.contracts.model import Model
from forge_core.engine.build import BuiltModel, build_context, build_model, build_tokenizer
from forge_core.job import Job
from forge_core.parallel.initialise import DTYPES
from forge_core.parallel.mesh import join_ranks, world_size
from forge_core.plugins.catalog import Catalog, first_party
from forge_core.plugins.manager import RunContext
from forge_kit.tools.checkpoints import load_model as load_weights

WANTED = "a model takes ids of tokens, (S) or (B, S); model.tokenizer.encode(text) makes them"


@frozen(eq=False)
class TrainedModel:
    """A trained model, as `load_model` returns it; `model(ids)` are its logits.

    It has a method for each installed command that offers one (see `Command`): `model.generate("…")`, for example.
    """

    model: Model = field(repr=False)
    """The module, in evaluation mode."""
    tokenizer: Tokenizer | None = field(repr=False)
    job: Job = field(repr=False)
    """The job of its training, with the stages and keys that `load_model` was given."""
    step: int
    checkpoint: Path
    context: RunContext = field(repr=False)
    """Where it was built: layout, mesh and device."""
    built: BuiltModel = field(repr=False)
    """The model with its stages, and its facts; `forge_kit.tools.ranks.executor_of` runs it under every layout."""
    _catalog: Catalog = field(repr=False)

    @torch.no_grad()  # and not inference_mode: tables that modules keep from here on must serve training, too
    def __call__(self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Compute the logits of the token after each.

        Args:
            ids: (S) or (B, S): sequences from their first token on, a list or a tensor anywhere.

        Returns:
            (S, V) or (B, S, V) on the model's device, in float32 (float64 of a model in float64).
        """
        if self.context.layout.world_size > self.context.layout.replicate:
            raise ForgeError(
                f"ranks share the model ({self.context.layout}): run it by forge_kit.tools.ranks.executor_of"
            )
        try:
            rows = torch.as_tensor(ids, device=next(self.model.parameters()).device)
        except (TypeError, ValueError, RuntimeError):
            raise ForgeError(f"{WANTED}, not {type(ids).__name__} {ids!r:.60}") from None
        if rows.dtype not in (torch.int64, torch.int32) or rows.dim() not in (1, 2) or not rows.numel():
            raise ForgeError(f"{WANTED}, not {rows.dtype} of shape {tuple(rows.shape)}")
        # Here and not by the look-up, which on a GPU would end this process' use of it
        if self.tokenizer is not None and len(wrong := rows[(rows < 0) | (rows >= self.tokenizer.vocab_size)]):
            raise ForgeError(f"there is no token {int(wrong[0])}: the tokenizer has {self.tokenizer.vocab_size}")
        hidden = self.model({"input_ids": rows.long().reshape(-1, rows.shape[-1])})
        with self.model.head.whole(hidden.dtype):
            logits = self.model.head.logits(hidden)
        # As wide as in training, where losses are computed so
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(*rows.shape, -1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # notebooks ask for _repr_html_ and the like
            raise AttributeError(name)
        offers = self._catalog.matching("command", name)
        command = self._catalog.load_offer(offers[0]) if len(offers) == 1 else None
        if command and (method := getattr(sys.modules[command.__module__], "of_model", None)):
            return _named(name, MethodType(method, self))
        missing = "" if offers else first_party()["command"].get(name, "")
        hint = f": pip install {missing}" if missing else did_you_mean(name, ["generate", *dir(type(self))])
        raise AttributeError(f"a trained model has no {name!r}{hint}")


def _named(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a command, whose errors about arguments have the name by which it was called."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*arguments: Any, **settings: Any) -> Any:
        try:
            # Apart from the call, as a TypeError from within the method is no wrong argument
            signature.bind(*arguments, **settings)
        except TypeError as error:
            unknown = next((key for key in settings if key not in signature.parameters), "")
            raise TypeError(f"{name}(): {error}{did_you_mean(unknown, signature.parameters)}") from None
        return method(*arguments, **settings)

    return call


def load_model(
    path: Path | str,
    *,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    run: Path | str | None = None,
    parallel: Mapping[str, Any] | bool = False,
    overrides: Overrides = (),
    catalog: Catalog | None = None,
    check: Callable[[Tokenizer | None], object] = lambda tokenizer: None,
) -> TrainedModel:
    """Load a trained model in evaluation mode, with the weights that evaluations use (an average of them, say).

    Args:
        path: a run folder, of which the newest intact checkpoint is meant, or a checkpoint.
        device: as `train.device`; `auto` takes an accelerator if there is one.
        dtype: compute dtype, `bf16`, `fp32` or `fp64`; by default the dtype of its training.
        run: run folder with the tokenizer, where the checkpoint is elsewhere.
        parallel: stages by which ranks share the model, all of which call this: a table like `[parallel]`, or True for
            the table of its job. False: each process has the whole model, except for stages that `overrides` name.
        overrides: keys of its job to change, as in `load_job`.
        catalog: where components are looked up; by default everything installed.
        check: is called with the tokenizer before the model is loaded, which may take long.

    Raises:
        CheckpointError: there is no intact checkpoint, or the tokenizer is not the one of its training.
        ForgeError: there is no tokenizer, a part is not installed, stages do not fit, or an argument is not as above.
    """
    checkpoint, manifest = locate(Path(path), "sizes")
    catalog = catalog or Catalog.installed()
    # An empty table takes the place of the stages of its training
    stages: Overrides = {} if parallel is True else {"parallel": parallel or {}}
    needed = (*MODEL_TABLES, "parallel")
    job = parse_job(manifest["job"], str(checkpoint / "manifest.json"), catalog, needed, stages, overrides)
    job = _on_device(job, device, dtype)
    join_ranks(job.launch)
    # A batch that all stages accept on these ranks: a pipeline wants as many micro-batches as stages, in whole rounds
    train = attrs.evolve(job.train, global_batch_size=64 * world_size() ** 2, micro_batch_size=1)
    context = build_context(attrs.evolve(job, train=train), catalog, _folder(job, checkpoint, Path(run or path)))
    if (tokenizer := build_tokenizer(job, context)) is not None:
        check_tokenizer(manifest["provenance"], {"tokenizer": tokenizer.fingerprint()})
    check(tokenizer)
    built = build_model(context.job, context := attrs.evolve(context, tokenizer=tokenizer))
    load_weights(checkpoint, built.model)
    return TrainedModel(built.model.eval(), tokenizer, job, manifest["step"], checkpoint, context, built, catalog)


def _folder(job: Job, checkpoint: Path, first: Path) -> Path | None:
    # Checkpoints may have been moved; and where a storage keeps them elsewhere, the path alone has the run in it
    named = [first.parent.parent] if first.name.startswith("step-") else []
    folders = [first, *named, checkpoint.parent.parent, run_folder(job)]
    folder = next((folder for folder in folders if (folder / TOKENIZER).is_dir()), None)
    if folder is None and job.data.tokenizer is not None:
        searched = ", ".join(dict.fromkeys(map(str, folders)))
        hint = "give the folder of its run: --run FOLDER (from Python, run=FOLDER)"
        raise ForgeError(f"there is no tokenizer of {checkpoint} in {searched}; {hint}")
    return folder


def _on_device(job: Job, device: Any, dtype: Any) -> Job:
    precision: Any = next((name for name, value in DTYPES.items() if value == dtype), dtype or job.train.precision)
    if precision not in DTYPES:
        raise JobError(f"dtype is one of {', '.join(DTYPES)}; got {precision}")
    return attrs.evolve(job, train=attrs.evolve(job.train, device=device, precision=precision))
