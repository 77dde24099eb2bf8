"""Downstream tasks during training: the type `tasks` of kind `evaluation`, and the kind `task` for its tasks.

`file` reads items from a file; `copy`, `induction`, `recall`, `arithmetic` and `brackets` are made of random letters
and numbers; `modules` and `signatures` of Python's standard library.
"""

from forge_plugin_evaluate.tasks.file import File
from forge_plugin_evaluate.tasks.kinds import Item, TaskComponent
from forge_plugin_evaluate.tasks.library import Modules, Signatures
from forge_plugin_evaluate.tasks.synthetic import Arithmetic, Brackets, Copy, Induction, Recall
from forge_plugin_evaluate.tasks.tasks import Tasks

__all__ = [
    "Arithmetic",
    "Brackets",
    "Copy",
    "File",
    "Induction",
    "Item",
    "Modules",
    "Recall",
    "Signatures",
    "TaskComponent",
    "Tasks",
]
