"""Evaluation of vision-language models during training: `exact_match`, `anls`, `captions` and `multiple_choice`.

`forge_plugin_images.questions` finds the questions in rows of any dataset with images, `asked` finds the rows and the
right answers; `answers` lets the ranks of a run generate together, and `choice_rows` makes rows of choices, for which
losses are sufficient.
"""

from forge_plugin_vlm_eval.anls import Anls
from forge_plugin_vlm_eval.captions import Captions
from forge_plugin_vlm_eval.exact_match import ExactMatch
from forge_plugin_vlm_eval.multiple_choice import MultipleChoice

__all__ = ["Anls", "Captions", "ExactMatch", "MultipleChoice"]
