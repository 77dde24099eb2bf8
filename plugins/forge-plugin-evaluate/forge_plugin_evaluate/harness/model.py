"""`ForgeLM`: a trained Forge model as lm-evaluation-harness (0.4) calls it.

Shapes: B rows, S positions, D model width, V vocabulary, N scored tokens of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.data.tokenizers import begin_of_text
from forge_kit.nn.generation import with_prompt
from forge_kit.nn.products import size_multiple
from forge_plugin_evaluate.harness.chats import WritesChats
from forge_plugin_evaluate.harness.requests import GenerationSettings, Row, batches, before_any, rows_of
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.prompts import stop_ids

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.model import Model

Prompts = Sequence[tuple[list[int], int]]
"""Prompts of a batch, each with the number of its request."""
LOGITS = (2**22, 2**28)
"""Logits that are held at a time, on a CPU, in whose cache a few megabytes stay while they are read, and on a GPU."""
AT_LEAST = 64
"""Scored tokens whose logits are held at a time, however large the vocabulary."""
LOOK_BACK = 2
"""Tokens more than an end has, in which it is looked for: the model may divide it in another way."""


class ForgeLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A model and its tokenizer for `lm_eval.simple_evaluate(model=…)`; every type of request, in one process.

    Contexts and continuations become tokens by the rules of the harness. Log-probabilities are computed in float32 from
    the logits of the scored positions alone.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_size: int = 8,
        max_gen_toks: int = 256,
        chat: bool = False,
        seed: int = 0,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a trained model.

        Args:
            model: in evaluation mode (`forge_core.load_model`).
            tokenizer: its tokenizer.
            max_length: positions that the model is fed at most; longer inputs lose tokens on the left.
            batch_size: rows that are computed together.
            max_gen_toks: tokens to generate at most, where a task does not specify it.
            chat: whether texts are conversations, in which special tokens are spelt out. Pass `apply_chat_template` to
                the harness then.
            seed: seed of the draws of tasks that sample.
            info: entries for `config` of the results.

        Raises:
            JobError: `chat`, and the tokenizer writes no chats.
        """
        super().__init__()
        self._model: Any = model
        self._tokenizer, self._begin = tokenizer, begin_of_text(tokenizer)
        self._device = next(model.parameters()).device
        self._length, self._rows, self._most, self._seed = max_length, batch_size, max_gen_toks, seed
        self._info = dict(info or {})
        self._chats = tokenizer if chat and isinstance(tokenizer, WritesChats) else None
        if chat and (self._chats is None or not self._chats.chat_template):
            hint = 'train with [data.tokenizer] of type "auto" and a chat_template, or leave --chat out'
            raise JobError(f"this tokenizer has no chat template; {hint}")

    # --- what the harness asks for ---------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """Ends generation, pads rows, and stands for the beginning of text where the tokenizer has none."""
        return self._tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without context: the beginning of text, or else the end of the one before."""
        return self._begin[-1] if self._begin else self.eot_token_id

    @property
    def max_length(self) -> int:
        return self._length

    @property
    def max_gen_toks(self) -> int:
        return self._most

    @property
    def batch_size(self) -> int:
        return self._rows

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness' cache of requests."""
        return self._tokenizer.fingerprint()

    def get_model_info(self) -> dict[str, Any]:
        """Returns entries for `config` of the results."""
        count = sum(parameter.numel() for parameter in self._model.parameters())
        return {"model": "forge", "model_num_parameters": count, "max_length": self._length, **self._info}

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the template for the record."""
        return self._chats.chat_template if self._chats is not None else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation as text; raises a `ForgeError` unless the model was wrapped with `chat`."""
        if self._chats is None:
            raise ForgeError("chats were not asked for when the model was wrapped; pass chat=True to ForgeLM")
        return self._chats.chat_text(chat_history, goes_on=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text, with the beginning of text unless told otherwise, or it has that already."""
        # Special tokens in chats alone: a task's plain text that spells one out means its characters
        ids = self._tokenizer.encode(string) if self._chats is None else self._chats.encode_special(string)
        if add_special_tokens is False or (self._begin and ids[: len(self._begin)] == self._begin):
            return ids
        return [*self._begin, *ids]

    # --- log-probabilities -----------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        # By number: rows are sorted by length, and the harness expects the order of its requests
        results: list[Any] = [None] * len(requests)
        rows = rows_of(requests, self._length)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="log-probabilities") as bar:
            for batch in batches(rows, self._rows):
                for number, result in self._score(batch):
                    results[number] = result
                    if (key := requests[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", key, result)
                    bar.update()
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each whole text, in windows of which each scores its tokens once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            # One token of context between windows, as the harness' own models have it
            parts = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self._length, 1)
            own = [make_disjoint_window(part) for part in parts]
            # All windows of all texts in one call, so that batches are full
            windows += [(None, context, continuation) for context, continuation in own]
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    @torch.no_grad()
    def _score(self, rows: Sequence[Row]) -> list[tuple[int, tuple[float, bool]]]:
        """Returns the number of each request of a batch, with its log-probability and whether it is the likeliest."""
        length = self._padded(max(len(row.inputs) for row in rows), len(rows))
        padded = [[*row.inputs, *[self.eot_token_id] * (length - len(row.inputs))] for row in rows]
        # Of rows that share one, answers are single tokens; padding follows the answer.
        answers = [length - len(row.inputs) + len(row.scored[0].tokens) - 1 for row in rows]
        batch = {"input_ids": torch.tensor(padded, device=self._device)}
        hidden = self._model(with_prompt(self._model, batch, answers))
        wanted = [(number, len(row.inputs), scored) for number, row in enumerate(rows) for scored in row.scored]
        places = [
            (number, stop - len(scored.tokens) + offset)
            for number, stop, scored in wanted
            for offset in range(len(scored.tokens))
        ]
        labels = torch.tensor([token for *_, scored in wanted for token in scored.tokens], device=self._device)
        where = torch.tensor(places, device=self._device).unbind(1)
        values, likeliest = self._log_probabilities(hidden[where], labels)
        lengths = [len(scored.tokens) for *_, scored in wanted]
        return [
            (scored.request, (float(value.sum()), bool(greedy.all())))
            for (*_, scored), value, greedy in zip(
                wanted, values.cpu().split(lengths), likeliest.cpu().split(lengths), strict=True
            )
        ]

    def _padded(self, length: int, rows: int) -> int:
        """Returns the length for rows with which all their positions are of a size whose products are fast."""
        # In float32 that depends on the library of products; others are multiplied by oneDNN on any CPU.
        multiple = size_multiple(torch.float32) if self._device.type == "cpu" else 1
        # Of the product with the number of rows, which has a part of it already
        multiple //= math.gcd(multiple, rows)
        return min(-(-length // multiple) * multiple, max(self._length, length))

    def _at_a_time(self) -> int:
        """Returns for how many scored positions logits are held."""
        return max(AT_LEAST, LOGITS[self._device.type != "cpu"] // self._tokenizer.vocab_size // 32 * 32)

    def _log_probabilities(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D) and (N,) -> the labels' log-probabilities (N,), float64, and whether each is the likeliest, (N,)."""
        values, likeliest = [], []
        head = self._model.head
        at_a_time = self._at_a_time()
        with head.whole(hidden.dtype):
            for part, label in zip(hidden.split(at_a_time), labels.split(at_a_time), strict=True):
                logits = head.logits(part)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                right, top = logits.gather(-1, label[:, None]), logits.amax(-1, keepdim=True)
                likeliest.append(first_of_largest(logits, label, (right == top)[:, 0]))
                # In place: further copies of the logits take as long as their product.
                normaliser = logits.sub_(top).exp_().sum(-1, keepdim=True).log_()
                values.append((right - top - normaliser)[:, 0].double())
        return torch.cat(values), torch.cat(likeliest)

    # --- generation ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers in the order of the requests; those with equal settings are generated together."""
        texts: list[str] = [""] * len(requests)
        groups: dict[GenerationSettings, list[tuple[list[int], int]]] = {}
        for number, request in enumerate(requests):
            context, given = request.args
            settings = GenerationSettings.of(given, self._most)
            groups.setdefault(settings, []).append((self._prompt(context, settings), number))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generation") as bar:
            for settings, group in groups.items():
                # Rows of a batch are then of like length, and memory that does not suffice shows at once
                group.sort(key=lambda pair: -len(pair[0]))
                # Greedy rows take the place of rows that have ended; sampled rows stay in fixed batches.
                together = list(batches(group, self._rows)) if settings.temperature else [group]
                for batch in self._own(together, drawn=bool(settings.temperature)):
                    answers = self._generate([prompt for prompt, _ in batch], settings)
                    for (_, number), text in zip(batch, answers, strict=True):
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(batch))
        return texts

    def _own(self, together: Sequence[Prompts], drawn: bool) -> Iterator[Prompts]:
        """Yields the batches of prompts that this process generates."""
        yield from together

    def _prompt(self, context: str, settings: GenerationSettings) -> list[int]:
        room = self._length - settings.max_tokens
        if room < 1:
            message = f"{settings.max_tokens} tokens to generate leave no room for a prompt in {self._length} positions"
            raise JobError(f"{message}; choose a larger --max-length, or fewer by --gen-kwargs max_gen_toks=…")
        return (self.tok_encode(context) or [self.prefix_token_id])[-room:]  # the harness cuts on the left, too

    def _generate(self, prompts: Sequence[list[int]], settings: GenerationSettings) -> list[str]:
        sampling = Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
        rows = generate(
            self._model,
            prompts,
            settings.max_tokens,
            self.eot_token_id,
            sampling,
            stop=stop_ids(self._tokenizer),
            until=ends_of(self._tokenizer, settings.until),
            seed=self._seed,
            # Rows may wait for others only where no token is drawn
            batch_size=0 if settings.temperature else self._rows,
        )
        return [before_any(self._tokenizer.decode(row), settings.until) for row in rows]


def first_of_largest(logits: Tensor, labels: Tensor, is_largest: Tensor) -> Tensor:
    """Returns for which rows (N,) the label is what `argmax` returns: the first one of the largest logits.

    Args:
        logits: (N, V).
        labels: (N,).
        is_largest: (N,), whether the label's logit is as large as any.
    """
    # `argmax` takes ten times as long as a maximum on a CPU, and where the label has less there is nothing to ask.
    rows = is_largest.nonzero()[:, 0]
    return is_largest.index_put((rows,), logits[rows].argmax(-1) == labels[rows])


def ends_of(tokenizer: Tokenizer, until: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Returns whether a row's new tokens end with one of these texts in it; None without any."""
    if not until:
        return None
    last = max(len(tokenizer.encode(text)) for text in until) + LOOK_BACK
    return partial(_contains, tokenizer, until, last)


def _contains(tokenizer: Tokenizer, ends: Sequence[str], last: int, row: Sequence[int]) -> bool:
    # Its end alone: decoding all of it at each token would make the time grow with the square of its length
    text = tokenizer.decode(row[-last:])
    return any(end in text for end in ends)
