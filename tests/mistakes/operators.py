"""Careless changes of Python sources, found in their syntax trees: each one replaces an expression or a statement."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from attrs import frozen

SWAPPED_NAMES = {
    "tp": "cp",
    "cp": "tp",
    "shard": "replicate",
    "replicate": "shard",
    "all_reduce_tokens": "all_reduce_samples",
    "all_reduce_samples": "all_reduce_tokens",
    "data_parallel": "token_ranks",
    "token_ranks": "data_parallel",
    "argmax": "argmin",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
}
"""Groups of ranks and reductions, each with the one that is taken for it by mistake."""
MASKS = ("where", "masked_fill", "masked_fill_", "clamp", "clamp_", "nan_to_num")
"""Methods that return their tensor but for some elements."""

NOT_SWAPPED = (
    "isinstance", "issubclass", "max", "min", "maximum", "minimum", "equal", "isclose", "allclose", "gcd", "lcm",
    "logaddexp", "transpose", "swapaxes",
)  # fmt: skip
"""Functions whose arguments have no order, or could not be mistaken for one another."""
LOOKS = (
    "indent", "fontsize", "linewidth", "markersize", "dpi", "zorder", "hspace", "wspace", "nbins", "stacklevel", "repr"
)  # fmt: skip
"""Arguments that decide how a picture, a file or a warning looks, and not what it holds."""
SPEED = ("non_blocking", "timeout", "flush", "pin_memory", "slots", "refresh_per_second")
"""Arguments that decide how fast something is, how long one attempt of many waits, or how an object is stored."""
NO_DEFAULTS = (*LOOKS, *SPEED, "kw_only", "init")
"""Arguments without which a program computes the same: nobody gives by position what is given by name, and nobody gives
a private field."""
CLOCKS = ("time.time", "time.monotonic", "time.perf_counter")
"""Two readings of a clock do not differ by just the interval that they are compared with."""


@frozen
class Change:
    """One change of one file."""

    file: str
    """Relative to the repository."""
    line: int
    operator: str
    old: str
    new: str
    start: int
    """Offset of `old` in the file, in characters."""
    inside: tuple[str, ...]
    """Names of the class and the functions around it, the innermost last."""

    def apply(self, text: str) -> str:
        """Returns the text of the file with the change."""
        assert text.startswith(self.old, self.start), f"{self.file} is another one now"
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    def compiles(self, text: str) -> bool:
        """Whether the file is one of Python with the change."""
        try:
            compile(self.apply(text), self.file, "exec")
        except (SyntaxError, ValueError):
            return False
        return True


def changes(path: Path, root: Path) -> Iterator[Change]:
    """Yields every change of a file; not all compile."""
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    for node, inside in _nodes(ast.parse(text), ()):
        for operator, function in OPERATORS.items():
            for old, new in function(node):
                begin = starts[old.lineno - 1] + old.col_offset
                end = starts[(old.end_lineno or 1) - 1] + (old.end_col_offset or 0)
                before = raw[begin:end].decode()
                change = Change(
                    str(path.relative_to(root)), old.lineno, operator, before, new, len(raw[:begin].decode()), inside
                )
                if new != before:
                    yield change


def _nodes(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Yields nodes that compute something: no annotations, docstrings, messages of errors or imports."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            skipped = name in ("annotation", "returns", "decorator_list", "exc") or not isinstance(child, ast.AST)
            if skipped or isinstance(child, ast.Import | ast.ImportFrom | ast.JoinedStr) or _is_text(child):
                continue
            if _changes_no_result(child):
                continue
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            names = (*inside, child.name) if named else inside  # type: ignore[attr-defined]
            yield child, names
            yield from _nodes(child, names)


def _changes_no_result(node: ast.AST) -> bool:
    """An argument or a call whose value acts on looks or speed only."""
    if isinstance(node, ast.keyword):
        return node.arg in (*LOOKS, *SPEED)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "warnings.warn")


def _is_text(node: ast.AST) -> bool:
    """A docstring, or a block for type checkers."""
    checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    exported = isinstance(node, ast.Assign | ast.AugAssign) and "__all__" in ast.unparse(node)
    return checking or constant or exported


# --- operators: from a node to pairs of a node to replace, and its new text ------------------------------------------

Pairs = Iterator[tuple[ast.expr | ast.stmt, str]]
PRIMARIES = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
"""Expressions that need no parentheses before a dot."""


def off_by_one(node: ast.AST) -> Pairs:
    """`n` becomes `n + 1`, `<` becomes `<=`, and a slice begins one later."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1000:
        yield node, str(node.value + 1)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and not any(c in ast.unparse(node) for c in CLOCKS):
        others = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
        if (other := others.get(type(node.ops[0]))) is not None:
            yield node, ast.unparse(ast.Compare(node.left, [other()], node.comparators))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("range", "len"):
        is_range = ast.unparse(node.func) == "range"
        yield node, f"{ast.unparse(node)[:-1]} + 1)" if is_range else f"({ast.unparse(node)} - 1)"


def wrong_group(node: ast.AST) -> Pairs:
    """Another dimension of the mesh, another reduction, another dimension of a tensor."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SWAPPED_NAMES:
        yield node, repr(SWAPPED_NAMES[node.value])
    if isinstance(node, ast.Name) and node.id in SWAPPED_NAMES and isinstance(node.ctx, ast.Load):
        yield node, SWAPPED_NAMES[node.id]
    if isinstance(node, ast.Attribute) and node.attr in SWAPPED_NAMES and isinstance(node.ctx, ast.Load):
        of = ast.unparse(node.value)
        yield node, f"{of if isinstance(node.value, PRIMARIES) else f'({of})'}.{SWAPPED_NAMES[node.attr]}"


def missing_factor(node: ast.AST) -> Pairs:
    """A division or multiplication is left out."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mult):
        yield node, f"({ast.unparse(node.left)})"
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
        yield node, "pass"


def swapped_order(node: ast.AST) -> Pairs:
    """Two arguments or operands change places, or an order is turned round."""
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        first, second = node.args
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not starred and ast.unparse(node.func).rpartition(".")[2] not in NOT_SWAPPED:
            yield node, f"{ast.unparse(node.func)}({ast.unparse(second)}, {ast.unparse(first)})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        yield node, f"({ast.unparse(node.right)} - {ast.unparse(node.left)})"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "sorted" and node.args:
        yield node, f"list({ast.unparse(node.args[0])})"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "reversed":
        yield node, f"iter({ast.unparse(node.args[0])})"


def dropped_mask(node: ast.AST) -> Pairs:
    """A mask, a condition or a filter is left out."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MASKS:
        of = ast.unparse(node.func.value)
        yield node, of if of not in ("torch", "np") else ast.unparse(node)
    if isinstance(node, ast.BoolOp):
        yield node, f"({ast.unparse(node.values[0])})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield node, f"({ast.unparse(node.left)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield node, f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.IfExp):
        yield node, f"({ast.unparse(node.body)})"
    if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
        for generator in node.generators:
            if generator.ifs:
                yield generator.ifs[0], "True"


def wrong_default(node: ast.AST) -> Pairs:
    """Another value where the caller gives none."""
    defaults: list[ast.expr] = []
    if isinstance(node, ast.FunctionDef):
        defaults = [*node.args.defaults, *(value for value in node.args.kw_defaults if value is not None)]
    if isinstance(node, ast.Call):
        asserts = ast.unparse(node.func) == "zip"  # `strict`: sequences of ours, of one length if nothing else is wrong
        defaults = [] if asserts else [each.value for each in node.keywords if each.arg not in NO_DEFAULTS]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        defaults = [node.value]
    for value in defaults:
        if isinstance(value, ast.Constant):
            if isinstance(value.value, bool):
                yield value, str(not value.value)
            elif isinstance(value.value, int | float) and value.value:
                yield value, repr(value.value * 2)


def swallowed_error(node: ast.AST) -> Pairs:
    """An error or a problem is not raised."""
    if isinstance(node, ast.Raise) and "NotImplementedError" not in ast.unparse(node):
        yield node, "pass"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield) and "Problem(" in ast.unparse(node):
        yield node, "pass"


OPERATORS: dict[str, Callable[[ast.AST], Pairs]] = {
    function.__name__: function
    for function in (
        off_by_one,
        wrong_group,
        missing_factor,
        swapped_order,
        dropped_mask,
        wrong_default,
        swallowed_error,
    )
}
