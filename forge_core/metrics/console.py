"""Metrics on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import LoggerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


@frozen(kw_only=True)
class Console(LoggerComponent):
    """A live progress line on a terminal, plain lines anywhere else."""

    style: Literal["auto", "live", "plain", "off"] = "auto"
    """auto: live on a terminal, plain otherwise."""
    interval: int = field(default=0, validator=ge(0))
    """Steps between plain lines; 0: about fifty lines in the whole run."""

    def build(self, context: BuildContext) -> Any:
        from rich.console import Console as Terminal

        from forge_core.metrics.console_logger import LiveLogger, PlainLogger, SilentLogger

        terminal = Terminal(highlight=False)
        steps = context.job.train.steps
        style = self.style if self.style != "auto" else "live" if terminal.is_terminal else "plain"
        if style == "off":
            return SilentLogger()
        if style == "live":
            return LiveLogger(terminal, steps)
        return PlainLogger(terminal, steps, self.interval or max(1, steps // 50))


def describe(record: Mapping[str, Any]) -> str:
    """The numbers of a training line that a person follows."""
    parts = [f"loss {record['loss']:.4f}"]
    parts.append(f"grad norm {record['grad_norm']:.3g}")
    parts.append(f"lr {record['lr']:.3g}")
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record.get("skipped"):
        parts.append("update skipped")
    return "  ".join(parts)


def describe_evaluation(record: Mapping[str, Any]) -> str:
    """All numbers of an evaluation line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in record.items() if name != "step" and "tokens" not in name)
