"""`forge-run data prepare` as a step of datatrove, whose executors then start the parts: local, SLURM, Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from forge_core.contracts.errors import JobError

if TYPE_CHECKING:
    from forge_plugin_memmap.prepare.run import Settings


class ForgeTokens(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Does part `rank + 1` of `world_size` of `forge-run data prepare`: `tasks` of the executor is the number of parts.

    A part that was killed continues when the executor runs it again. When all are complete, `ForgeJoin`, in an executor
    that depends on the first one, makes the folder, with the bytes that one command would write.

        arguments = ["clean/documents", "--out", "data", "--tokenizer", "prepared", "--tokenizer.path=tokenizer"]
        parts = LocalPipelineExecutor([ForgeTokens(arguments)], tasks=8, logging_dir="logs/parts")
        LocalPipelineExecutor([ForgeJoin(arguments)], tasks=1, logging_dir="logs/join", depends=parts).run()

    Args:
        arguments: of the command, without `--part` and `--join`. `--workers` is 1 unless they have it, as an executor
            runs several tasks on a machine.

    Raises:
        JobError: an argument cannot be used, or the arguments have `--part` or `--join`.
        SystemExit: an option is unknown; argparse has printed why.
    """

    type = "tokens"
    name = "forge parts"

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__()
        self.arguments = [*arguments]
        if any(map(self._stated, ("--part", "--parts", "--join"))):
            raise JobError("ForgeTokens: the part follows from the executor; leave out --part, --parts and --join")
        # Here, and not in a task that was queued for hours
        self._settings()

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Does the part, of the files that the arguments name."""
        from rich.console import Console

        from forge_plugin_memmap.prepare.part_range import Part
        from forge_plugin_memmap.prepare.parts import prepare_part

        if data is not None:
            raise JobError("ForgeTokens reads the files of its arguments; it is the first step of a pipeline")
        part = Part(rank + 1, world_size)
        settings = self._settings("--part", str(part))
        record, _ = prepare_part(settings, part, Console(stderr=True, quiet=True))
        # Of parts that are joined already, an executor that starts again has nothing to count
        if record is None:
            return
        # Held-out documents are chosen by the join: until then, all are of this split
        counts = record["splits"]["train"]["total"]
        for name in ("documents", "tokens"):
            self.stat_update(name, value=counts[name], unit="part")

    def _settings(self, *more: str) -> Settings:
        from forge_plugin_memmap.prepare.command import parse, read_settings

        workers = [] if self._stated("--workers") else ["--workers", "1"]
        return read_settings(*parse([*self.arguments, *workers, *more]))

    def _stated(self, option: str) -> bool:
        return any(argument.partition("=")[0] == option for argument in self.arguments)


class ForgeJoin(ForgeTokens):
    """Makes the folder of all parts that `ForgeTokens` has done, in a single task.

    Raises:
        JobError: a part is missing, unfinished, or was done with other arguments.
    """

    name = "forge join"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Joins the parts."""
        from rich.console import Console

        from forge_plugin_memmap.prepare.join import join

        del data, rank
        if world_size != 1:
            raise JobError(f"ForgeJoin is one task, and the executor has tasks = {world_size}")
        manifest, _ = join(self._settings("--join"), Console(stderr=True, quiet=True))
        for split, counts in manifest["splits"].items():
            self.stat_update(f"{split} tokens", value=counts["tokens"], unit="split")
