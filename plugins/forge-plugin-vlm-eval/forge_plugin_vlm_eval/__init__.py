"""Evaluation of vision-language models during training.

`exact_match`, `anls`, `captions` and `multiple_choice` compare answers with the right ones: `questions` finds the
questions in rows of any dataset with images, `asked` finds the rows and the right answers; `generation` lets the ranks
of a run generate together, and `choice_rows` makes rows of choices, for which losses are sufficient.

`answers` compares what a model says of held-out rows with their learned text (`row_answers`) and draws it (`gallery`).
`looking` compares losses with other images, and with frames in another order (`frame_order`).
"""

from forge_plugin_vlm_eval.anls import Anls
from forge_plugin_vlm_eval.answers import Answers
from forge_plugin_vlm_eval.captions import Captions
from forge_plugin_vlm_eval.exact_match import ExactMatch
from forge_plugin_vlm_eval.looking import Looking
from forge_plugin_vlm_eval.multiple_choice import MultipleChoice

__all__ = ["Anls", "Answers", "Captions", "ExactMatch", "Looking", "MultipleChoice"]
