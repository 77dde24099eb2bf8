"""`ForgeLMM`: a trained vision-language model as lmms-eval (0.7) calls it.

Shapes: B rows, S positions, D model width, N scored tokens of a batch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lmms_eval.api.instance import GenerationResult
from lmms_eval.api.model import lmms
from torch import Tensor
from tqdm import tqdm

from forge_core.contracts.errors import JobError
from forge_kit.data.tokenizers import begin_of_text
from forge_kit.nn.generation import with_prompt
from forge_plugin_evaluate.harness.model import ends_of, first_of_largest
from forge_plugin_evaluate.harness.requests import GenerationSettings, batches, before_any
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.prompts import stop_ids
from forge_plugin_images.content import MARK
from forge_plugin_images.decoding import BytesImage
from forge_plugin_images.prompts import prompts_with_images

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_plugin_generate import Prompts

PLAIN = {"num_beams": (None, 1), "image_aspect_ratio": None}
"""Settings of generation that nearly all tasks have, with the values that change nothing here; None: all of them."""


class ForgeLMM(lmms):  # type: ignore[misc]  # the harness has no types
    """A model and its tokenizer for `lmms_eval.evaluator.simple_evaluate(model=…)`, in one process.

    Images stand where a context has `<image>`, else before it, and are resized as in training. A log-likelihood is what
    the models of the harness return under that name, by which its tasks choose: the mean loss of the continuation's
    tokens, of which less is better.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        job: Job,
        *,
        max_length: int,
        batch_size: int = 8,
        max_gen_toks: int = 256,
        chat: bool = False,
        system: str = "",
        seed: int = 0,
    ) -> None:
        """Wrap a trained model.

        Args:
            model: in evaluation mode (`forge_core.load_model`).
            tokenizer: its tokenizer.
            job: the job of its training, which specifies how images are resized.
            max_length: positions that the model is fed at most.
            batch_size: rows that are computed together.
            max_gen_toks: tokens to generate at most, where a task does not specify it.
            chat: whether contexts are asked as the user's turn of the tokenizer's chat template.
            system: with `chat`, the system's message.
            seed: seed of the draws of tasks that sample.

        Raises:
            JobError: `chat`, and the tokenizer writes no chats.
        """
        from forge_plugin_evaluate.harness.chats import WritesChats

        super().__init__()
        self._model: Any = model
        self._tokenizer, self._job = tokenizer, job
        self._device = next(model.parameters()).device
        self._length, self._rows, self._most, self._seed = max_length, batch_size, max_gen_toks, seed
        self._chats = tokenizer if chat and isinstance(tokenizer, WritesChats) else None
        self._system = system
        if chat and (self._chats is None or not self._chats.chat_template):
            hint = 'train with [data.tokenizer] of type "auto" and a chat_template, or leave --chat out'
            raise JobError(f"this tokenizer has no chat template; {hint}")

    @property
    def device(self) -> torch.device:
        return self._device

    def loglikelihood(self, requests: Sequence[Any]) -> list[GenerationResult]:
        """Returns for each request the mean loss of its continuation, and whether that is the likeliest."""
        # The harness (0.7.3) makes a text of any result that is no `GenerationResult`, a pair of numbers too.
        results: list[GenerationResult] = []
        with tqdm(total=len(requests), desc="losses") as bar:
            for part in batches(requests, self._rows):
                asked = []
                for request in part:
                    context, target, visuals, number, task, split = _six(request)
                    document = self.task_dict[task][split][number]
                    text = target if isinstance(target, str) else str(target(document))
                    asked.append((self._text(context, shown := visuals(document)), shown, text))
                results += map(GenerationResult, self._losses(asked))
                bar.update(len(part))
        return results

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns the answers in the order of the requests; those with equal settings are generated together."""
        texts: list[str] = [""] * len(requests)
        groups: dict[GenerationSettings, list[int]] = {}
        for number, request in enumerate(requests):
            # One call generates with one set of settings, so requests are grouped by them
            groups.setdefault(self._settings(_six(request)[1]), []).append(number)
        with tqdm(total=len(requests), desc="generation") as bar:
            for settings, numbers in groups.items():
                for part in batches(numbers, self._rows):
                    answers = self._generated([requests[number] for number in part], settings)
                    for number, answer in zip(part, answers, strict=True):
                        texts[number] = answer
                    bar.update(len(part))
        return texts

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Raises a `JobError`: tasks of several rounds are not supported."""
        raise JobError("tasks of several rounds are not asked; choose others by --tasks")

    # --- prompts ---------------------------------------------------------------------------------------------------

    def _settings(self, given: Mapping[str, Any]) -> GenerationSettings:
        # Nearly all tasks have these settings, and would be refused for them
        kept = {
            name: value
            for name, value in given.items()
            if name not in PLAIN or ((plain := PLAIN[name]) is not None and value not in plain)
        }
        return GenerationSettings.of(kept, self._most)

    def _text(self, context: str, visuals: Sequence[Any] | None) -> str:
        """Returns the text of a prompt, with `<image>` for each image."""
        marks = context.count(MARK)
        count = len(visuals or ())
        if marks and marks != count:
            raise JobError(
                f"a context has {MARK} {marks} times and {count} images: {context[:60]!r}; leave its task out"
            )
        text = context if marks else MARK * count + context
        if self._chats is None:
            return text
        turns = [{"role": "system", "content": self._system}] if self._system else []
        return self._chats.chat_text([*turns, {"role": "user", "content": self._content(text)}])

    def _content(self, text: str) -> Any:
        """Returns a turn as the template reads it: a text, or a list of texts and images if it writes those itself."""
        if not self._image_token:
            return text
        parts: list[dict[str, str]] = []
        for number, part in enumerate(text.split(MARK)):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": part}] if part else []
        return parts

    @property
    def _image_token(self) -> str:
        """The text that the chat template writes for an image, as declared by the source of chats."""
        return next((token for source in self._job.data.sources if (token := getattr(source, "image_token", ""))), "")

    def _prompts(self, texts: Sequence[str], visuals: Sequence[Sequence[Any] | None]) -> Prompts:
        token = self._image_token if self._chats is not None else ""
        # The template has written its own text for each image, and the prompts are divided at `<image>`
        texts = [text.replace(token, MARK) for text in texts] if token else texts
        images = [_image(visual) for each in visuals for visual in each or ()]
        encode = None if self._chats is None else self._chats.encode_special
        begins = self._chats is not None and bool(begin := begin_of_text(self._tokenizer))
        prompts = prompts_with_images(texts, images, self._job, self._tokenizer, encode=encode)
        if begins:  # a template may have written the beginning of text itself
            twice = [*begin, *begin]
            ids = [own[len(begin) :] if own[: len(twice)] == twice else own for own in prompts.ids]
            prompts = prompts._replace(ids=ids)
        return prompts

    def _check_room(self, positions: int, what: str) -> None:
        if positions > self._length:
            message = f"{what} has {positions} positions, and rows have {self._length}"
            raise JobError(f"{message}; choose a larger --max-length, or leave its task out")

    # --- computing -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _losses(self, asked: Sequence[tuple[str, Any, str]]) -> Iterator[tuple[float, bool]]:
        prompts = self._prompts([text for text, _, _ in asked], [visuals for _, visuals, _ in asked])
        answers = self._tokenizer.encode_batch([answer for *_, answer in asked])
        if not all(answers):
            raise JobError("a continuation is empty; leave its task out")
        rows = [[*ids, *answer[:-1]] for ids, answer in zip(prompts.ids, answers, strict=True)]
        length = max(map(len, rows))
        self._check_room(length, "a question with its continuation")
        padded = [[*row, *[self._tokenizer.end_of_text] * (length - len(row))] for row in rows]
        batch = {"input_ids": torch.tensor(padded, device=self._device), **self._entries(prompts)}
        hidden = self._model(with_prompt(self._model, batch, [length - len(ids) for ids in prompts.ids]))
        places = [
            (number, len(ids) - 1 + offset)
            for number, (ids, answer) in enumerate(zip(prompts.ids, answers, strict=True))
            for offset in range(len(answer))
        ]
        labels = torch.tensor([token for answer in answers for token in answer], device=self._device)
        # Scored positions alone: logits of whole rows would take S times the vocabulary for each of them
        losses, likeliest = self._scored(hidden[torch.tensor(places, device=self._device).unbind(1)], labels)
        lengths = [len(answer) for answer in answers]
        for loss, greedy in zip(losses.split(lengths), likeliest.split(lengths), strict=True):
            yield float(loss.mean()), bool(greedy.all())

    def _scored(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D) and (N,) -> the labels' losses (N,), float64, and whether each is the likeliest, (N,)."""
        head = self._model.head
        with head.whole(hidden.dtype):
            logits = head.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        right = logits.gather(-1, labels[:, None])[:, 0]
        losses = logits.logsumexp(-1) - right
        return losses.double().cpu(), first_of_largest(logits, labels, right == logits.amax(-1)).cpu()

    def _generated(self, requests: Sequence[Any], settings: GenerationSettings) -> list[str]:
        texts, visuals = [], []
        for request in requests:
            context, _, visual_of, number, task, split = _six(request)
            visuals.append(visual_of(self.task_dict[task][split][number]))
            texts.append(self._text(context, visuals[-1]))
        prompts = self._prompts(texts, visuals)
        self._check_room(max(map(len, prompts.ids)) + settings.max_tokens, "a question with its answer")
        rows = generate(
            self._model,
            prompts.ids,
            settings.max_tokens,
            self._tokenizer.end_of_text,
            Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p),
            stop=stop_ids(self._tokenizer),
            until=ends_of(self._tokenizer, settings.until),
            seed=self._seed,
            entries=self._entries(prompts),
        )
        return [before_any(self._tokenizer.decode(row), settings.until) for row in rows]

    def _entries(self, prompts: Prompts) -> dict[str, Tensor]:
        return {name: entry.to(self._device) for name, entry in prompts.entries.items()}


def _six(request: Any) -> tuple[Any, ...]:
    """Returns context, target or settings, function of the images, number of the document, task and split."""
    if len(request.args) != 6:
        raise JobError("acc_mutual_info requests choices without their question; leave that metric out")
    return tuple(request.args)


def _image(visual: Any) -> BytesImage:
    from PIL import Image

    if not isinstance(visual, Image.Image):
        message = f"a task shows {str(visual)[:60]!r}, which is no image"
        raise JobError(f"{message}; videos and sounds of lmms-eval are not asked, so leave its task out")
    data = io.BytesIO()
    # PNG has no CMYK, and both formats keep every pixel as it is
    visual.save(data, "PNG" if visual.mode in ("1", "L", "LA", "I", "P", "RGB", "RGBA") else "TIFF")
    return BytesImage("image of a task", data.getvalue())
