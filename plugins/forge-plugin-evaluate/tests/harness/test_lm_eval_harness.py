"""Scores are those of the harness' own `hf` model with the same weights, for every type of request."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forge_core.cli import main
from forge_core.contracts.errors import ForgeError
from forge_plugin_evaluate.harness import command, model
from forge_plugin_evaluate.harness.model import ForgeLM
from forge_plugin_generate.command import load_trained
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_transformer.huggingface_names import to_huggingface
from forge_testing.refusals import lacks, naming, refuses

LENGTH = 48
SENTENCE = "the cat dog bird sat ran flew on over a mat log tree and then it was red blue green"
WORDS = SENTENCE.split()
SPECIAL = ["<|endoftext|>", "<|begin|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
JOB = """
[job]
name = "{name}"
output = "runs"

[model]
type = "transformer"
dim = 32
layers = 2
init_std = 0.3
attention = {{ heads = 4, kv_heads = 2 }}
ffn = {{ hidden = 48 }}

[train]
steps = 2
global_batch_size = 4
seq_len = 48
device = "cpu"

[optimizer]
type = "forge_testing:TinyAdamW"

[data.tokenizer]
type = "auto"
path = "tokenizer-{name}"
{tokenizer}

[[data.sources]]
type = "text"
path = "text.txt"
"""
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
LETTER = """
task: letter
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: ["the", "cat", "red"]
doc_to_target: 1
metric_list: [{{metric: acc}}, {{metric: brier_score}}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rolling.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "cat"
generation_kwargs: {{until: [" the", "\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
TASKS = {"choice": CHOICE, "letter": LETTER, "rolling": ROLLING, "written": WRITTEN}


def text(start, count):
    return " ".join(WORDS[(start * 7 + number * (3 + start % 5)) % len(WORDS)] for number in range(count))


def save_tokenizer(folder, begins):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([text(number, 40) for number in range(9)], trainer)
    tokens = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "additional_special_tokens": SPECIAL[2:]}
    if begins:
        begin = ("<|begin|>", inner.token_to_id("<|begin|>"))
        inner.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
        tokens |= {"bos_token": "<|begin|>", "chat_template": TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=inner, **tokens).save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, `plain` and `chat`, of which the second has a beginning of text and a template; and tasks."""
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FORGE_CACHE", str(folder / "cache"))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
        datasets.disable_progress_bars()
        Path("text.txt").write_text("\n".join(text(number, 60) for number in range(30)))
        for name, begins in (("plain", False), ("chat", True)):
            save_tokenizer(f"tokenizer-{name}", begins)
            Path("job.toml").write_text(JOB.format(name=name, tokenizer='begin_of_text = "auto"' if begins else ""))
            assert main(["run", "job.toml"]) == 0
        tasks = folder / "tasks"
        tasks.mkdir()
        for name, yaml in TASKS.items():
            (tasks / f"{name}.yaml").write_text(yaml.format(folder=folder))
        rows = [
            {"question": text(n, 3 + n * 3), "choices": [text(n + c, 1 + 2 * c) for c in range(3)], "label": n % 3}
            for n in range(9)  # the last ones are longer than a row
        ]
        (folder / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        texts = [{"text": text(number, 10 + 30 * number)} for number in range(4)]
        (folder / "rolling.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        yield folder


@pytest.fixture(params=["plain", "chat"])
def both(request, runs, monkeypatch):
    """Our model and the harness' own, with equal weights."""
    monkeypatch.chdir(runs)
    trained = load_trained(f"runs/{request.param}", "cpu")
    lm = ForgeLM(trained.model, trained.tokenizer, max_length=LENGTH, batch_size=4, chat=request.param == "chat")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"tokenizer-{request.param}")
    reference = HFLM(pretrained=huggingface(trained.model), tokenizer=tokenizer, batch_size=4, max_length=LENGTH)
    return SimpleNamespace(forge=lm, hf=reference, name=request.param)


def huggingface(model):
    parameters = {to_huggingface(name): parameter.detach() for name, parameter in model.named_parameters()}
    config = LlamaConfig(
        vocab_size=len(parameters["lm_head.weight"]),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=model.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    reference = LlamaForCausalLM(config)
    missing = reference.load_state_dict(parameters, strict=False)
    assert not missing.unexpected_keys
    assert not missing.missing_keys
    return reference.eval()


def scores(lm, runs, **options):
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=str(runs / "tasks"), include_defaults=False)
    return simple_evaluate(model=lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **options)


def answers(results):
    return {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}


def flat(value):
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("options", [{}, {"num_fewshot": 1}, {"system_instruction": "it was"}], ids=str)
def test_scores_equal_those_of_the_harness(both, runs, options):
    options = options | {"apply_chat_template": both.name == "chat"}
    ours, theirs = scores(both.forge, runs, **options), scores(both.hf, runs, **options)
    for name, task in theirs["results"].items():
        for metric, value in task.items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, metric)
    for name, given in answers(theirs).items():
        for mine, other in zip(flat(answers(ours)[name]), flat(given), strict=True):
            assert mine == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other)
    written = flat(answers(ours)["written"])
    assert len(set(written)) > 3  # the model writes something
    likeliest = [value for value in flat(answers(ours)["choice"]) if isinstance(value, float)]
    assert all(math.isfinite(value) and value < 0 for value in likeliest)


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_scores_equal_those_of_the_exported_folder(name, runs, monkeypatch, tmp_path):
    monkeypatch.chdir(runs)
    folder = str(tmp_path / "exported")
    assert main(["weights", "export", f"runs/{name}", "--out", folder]) == 0
    trained = load_trained(f"runs/{name}", "cpu")
    lm = ForgeLM(trained.model, trained.tokenizer, max_length=LENGTH, batch_size=4)
    ours = answers(scores(lm, runs))
    theirs = answers(scores(HFLM(pretrained=folder, batch_size=4, max_length=LENGTH, device="cpu"), runs))
    for task, given in theirs.items():
        for mine, other in zip(flat(ours[task]), flat(given), strict=True):
            assert mine == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other), task


def test_the_size_of_a_batch_changes_nothing(runs, monkeypatch):
    monkeypatch.chdir(runs)
    trained = load_trained("runs/plain", "cpu")
    lms = [ForgeLM(trained.model, trained.tokenizer, max_length=LENGTH, batch_size=size) for size in (1, 7)]
    one, other = (answers(scores(lm, runs)) for lm in lms)
    for name in TASKS:
        for mine, theirs in zip(flat(one[name]), flat(other[name]), strict=True):
            assert mine == (pytest.approx(theirs, rel=1e-4) if isinstance(theirs, float) else theirs)


def request(*args):
    return SimpleNamespace(args=args)


@pytest.fixture
def lm(runs, monkeypatch):
    monkeypatch.chdir(runs)
    trained = load_trained("runs/plain", "cpu")
    return ForgeLM(trained.model, trained.tokenizer, max_length=LENGTH, batch_size=4)


def test_answers_of_one_token_share_a_row(lm):
    fed = []
    lm._model.register_forward_pre_hook(lambda module, args: fed.append(len(args[0]["input_ids"])))
    requests = [request("the cat sat on", f" {word}") for word in ("the", "mat", "log")]
    together = lm.loglikelihood(requests, disable_tqdm=True)
    assert fed == [1]
    alone = [lm.loglikelihood([each], disable_tqdm=True)[0] for each in requests]
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone])


def test_the_likeliest_continuation_is_greedy(lm):
    prompt = lm.tok_encode("the cat")
    [row] = generate(lm._model, [prompt], 4, lm.eot_token_id, Sampling(temperature=0))
    other = [*row[:-1], (row[-1] + 1) % 300]
    likely, unlikely = lm._loglikelihood_tokens([(None, prompt, row), (None, prompt, other)], disable_tqdm=True)
    assert (likely[1], unlikely[1]) == (True, False)
    assert 0 > likely[0] > unlikely[0]


def test_a_row_ends_at_its_text_though_tokens_are_left(lm):
    [whole] = lm.generate_until([request("the cat", {"max_gen_toks": 20})], disable_tqdm=True)
    end = whole[3:5]
    lengths = []
    decode = lm._model.decode
    lm._model.decode = lambda batch, cache: lengths.append(1) or decode(batch, cache)
    [cut] = lm.generate_until([request("the cat", {"max_gen_toks": 20, "until": [end]})], disable_tqdm=True)
    assert cut == whole.partition(end)[0]
    assert len(lengths) < 20


def test_draws_follow_the_seed(lm):
    def drawn(seed):
        lm._seed = seed
        given = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.9}
        return lm.generate_until([request("the cat", given)], disable_tqdm=True)

    assert drawn(0) == drawn(0) != drawn(1)


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"num_beams": 3}, ["generation_kwargs", "num_beams", "do_sample", "until"]),
        ({"max_gen_toks": LENGTH}, ["48 tokens", "48 positions"]),
    ],
)
def test_what_a_task_may_not_ask_for(lm, given, facts):
    with pytest.raises(ForgeError, match=naming(*facts)):
        lm.generate_until([request("the cat", given)], disable_tqdm=True)


def test_a_continuation_that_does_not_fit_is_refused(lm):
    with pytest.raises(ForgeError, match=naming("90 tokens", "1 to 48")):
        lm.loglikelihood([request("the", " " + text(1, 90))], disable_tqdm=True)


def test_chats_need_a_template(lm, runs):
    with pytest.raises(ForgeError, match=naming("chats")):
        lm.apply_chat_template([{"role": "user", "content": "the cat"}])
    with refuses("", '"auto"', "chat_template", "--chat"):
        ForgeLM(lm._model, lm._tokenizer, max_length=LENGTH, chat=True)


def test_an_answer_that_has_begun_is_continued(runs, monkeypatch):
    monkeypatch.chdir(runs)
    trained = load_trained("runs/chat", "cpu")
    chat = ForgeLM(trained.model, trained.tokenizer, max_length=LENGTH, chat=True)
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]
    begun = chat.apply_chat_template(messages, add_generation_prompt=False)
    assert begun == "<|begin|><|user|>the<|end|><|assistant|>cat"
    assert chat.tok_encode(begun).count(trained.tokenizer.token_id("<|begin|>")) == 1


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_list_of_packages(monkeypatch):
    """The harness runs `pip list` at the end of each evaluation, which takes longer than the rest."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(autouse=True)
def harness_tasks(tmp_path, monkeypatch):
    """The harness' own tasks are one, `theirs`: reading the thousands that it has takes ten seconds each time."""
    folder = tmp_path / "harness"
    folder.mkdir()
    (folder / "theirs.yaml").write_text("task: theirs\ndataset_path: json\noutput_type: loglikelihood\n")
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(folder / "manager.py"))
    return folder / "theirs.yaml"


def evaluate(*options):
    return main(["evaluate", "runs/plain", "--device", "cpu", "--include", "tasks", "--bootstrap", "0", *options])


def test_the_command_prints_a_table_and_writes_a_file(lm, runs, capsys):
    options = ["--limit", "3", "--batch-size", "2", "--out", "out/results.json", "--items"]
    assert evaluate("--tasks", "choice,roll*", *options) == 0
    shown, said = capsys.readouterr()
    assert not lacks(said, "to the first request", "after the last")
    assert "|choice " in shown
    assert "|rolling" in shown
    written = json.loads((runs / "out/results.json").read_text())
    assert written["config"]["step"] == 2
    assert written["config"]["checkpoint"].endswith("runs/plain/checkpoints/step-2")
    assert len(written["samples"]["choice"]) == 3
    assert {"choice", "rolling"} == set(written["results"])
    assert evaluate("--tasks", "choice,roll*", *options[:4], "--out", "out/again.json", "--items", "--json") == 0
    facts, again = json.loads(capsys.readouterr().out), json.loads((runs / "out/again.json").read_text())
    assert {"generator": again["generator"], **facts} == again
    for name in ("results", "samples", "step", "checkpoint"):
        assert facts[name] == written[name]
    times = facts["times"]
    assert set(times) == {"before_s", "requests_s", "between_s", "after_s"}
    assert all(seconds > 0 for seconds in times.values())


def test_outside_a_repository_git_is_not_heard(lm, runs, capfd):
    assert not any((folder / ".git").exists() for folder in (runs, *runs.parents))
    assert evaluate("--tasks", "choice", "--limit", "1", "--json") == 0
    out, said = capfd.readouterr()
    assert "not a git repository" not in said
    assert json.loads(out)["git_hash"] is None


def test_items_that_nothing_would_show_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        evaluate("--tasks", "choice", "--items")
    assert not lacks(capsys.readouterr().err, "--items", "--out", "--json")


def test_what_trained_the_model_need_not_be_installed(lm, runs, tmp_path, capsys):
    shutil.copytree(runs / "runs/plain", tmp_path / "plain")
    [manifest] = tmp_path.glob("plain/checkpoints/*/manifest.json")
    text = manifest.read_text()
    assert "forge_testing.tiny:TinyAdamW" in text
    manifest.write_text(text.replace("forge_testing.tiny:TinyAdamW", "forge-plugin-nowhere/nobody"))
    shown = []
    options = ["--device=cpu", "--include=tasks", "--bootstrap=0", "--tasks=choice", "--limit=3"]
    for run in ("runs/plain", str(tmp_path / "plain")):
        assert main(["evaluate", run, *options]) == 0
        shown.append(capsys.readouterr().out)
    assert "|choice|" in shown[0]
    assert shown[1] == shown[0]


def test_the_harness_tasks_are_read_only_where_they_may_be_meant(lm, runs, harness_tasks):
    def names(tasks):
        manager, matching = command._tasks(tasks, [runs / "tasks"])
        return matching, "theirs" in manager.all_tasks

    assert names("choice, rolling") == (["choice", "rolling"], False)
    assert names("choice,theirs") == (["choice", "theirs"], True)
    assert names("roll*,the*") == (["rolling", "theirs"], True)
    (runs / "tasks/both.yaml").write_text("group: both\ntask: [choice, theirs]\n")
    assert names("both") == (["both"], True)
    (runs / "tasks/both.yaml").unlink()


def test_a_missing_harness_is_named_with_what_installs_it(lm, monkeypatch, capsys):
    monkeypatch.setattr("forge_plugin_evaluate.harness.command.find_spec", lambda name: None)
    assert main(["evaluate", "runs/plain", "--tasks", "choice"]) == 1
    assert "pip install 'forge-plugin-evaluate[harness]'" in capsys.readouterr().err


def test_wrong_tasks_are_named(lm, capsys):
    assert evaluate("--tasks", "choise,rolling") == 2
    assert not lacks(capsys.readouterr().err, "'choise'", "--include", "'choice'")
    assert main(["evaluate", "runs/plain", "--tasks", "choice", "--include", "nowhere"]) == 2
    assert not lacks(capsys.readouterr().err, "--include", "nowhere")


def test_mistakes_are_one_message_and_a_bad_job(lm, runs, capsys):
    (runs / "tasks/no_data.yaml").write_text(
        (runs / "tasks/choice.yaml")
        .read_text()
        .replace("task: choice", "task: no_data")
        .replace("choice.jsonl", "gone")
    )
    (runs / "published").mkdir()
    (runs / "published/config.json").write_text("{}")
    cases = {
        ("runs/plain", "--tasks", "no_data"): "--tasks: a task of no_data cannot be loaded: FileNotFoundError: ",
        ("runs/plain", "--tasks", "written", "--gen-kwargs", "num_beams=4"): "generation_kwargs has num_beams",
        ("runs/plain", "--tasks", "written", "--max-length", "4"): "leave no room for a prompt in 4 positions",
        ("runs/plain", "--tasks", "choice", "--chat"): "this tokenizer has no chat template",
        ("published", "--tasks", "choice"): "forge-run weights import published --out runs/published",
        ("runs/gone", "--tasks", "choice"): "runs/gone: no such run folder or checkpoint",
        ("tasks", "--tasks", "choice"): "tasks is neither a checkpoint nor a run folder with checkpoints",
    }
    for options, message in cases.items():
        capsys.readouterr()
        assert main(["evaluate", *options, "--device", "cpu", "--include", "tasks"]) == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert "Traceback" not in shown


def test_one_batch_of_any_size_and_ties_are_those_of_argmax(lm):
    hidden = torch.randn(70, 32)
    with torch.no_grad():
        logits = lm._model.head.logits(hidden).double()
        top = logits.argmax(-1)
        second = logits.scatter(-1, top[:, None], -torch.inf).argmax(-1)
        labels = torch.where(torch.arange(70) % 2 == 0, top, second)
        values, likeliest = lm._log_probabilities(hidden, labels)
    torch.testing.assert_close(values, logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0], atol=1e-5, rtol=0)
    assert likeliest.tolist() == [number % 2 == 0 for number in range(70)]
    tied = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 1.0]])
    for label in range(3):
        right, top = tied[:, label], tied.amax(-1)
        first = model.first_of_largest(tied, torch.full((2,), label), right == top)
        assert first.tolist() == (tied.argmax(-1) == label).tolist()


def test_settings_of_generation_come_from_the_command_too(lm, runs):
    lengths = []
    for count in (1, 3):
        path = f"written-{count}.json"
        options = ["--gen-kwargs", f"max_gen_toks={count}", "--out", path, "--items"]
        assert evaluate("--tasks", "written", *options) == 0
        samples = json.loads((runs / path).read_text())["samples"]["written"]
        lengths.append(sum(len(sample["resps"][0][0]) for sample in samples))
    assert 0 < lengths[0] < lengths[1]


def test_a_bfloat16_model_is_scored_in_float32(lm):
    hidden = torch.randn(3, 32, dtype=torch.bfloat16)
    values, _ = lm._log_probabilities(hidden, torch.tensor([1, 2, 3]))
    assert values.dtype == torch.float64
