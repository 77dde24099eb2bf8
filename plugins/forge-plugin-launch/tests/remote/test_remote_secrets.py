"""What counts as a secret, and what does not."""

from __future__ import annotations

import pytest

from forge_plugin_launch.remote.secret_values import is_secret, known_token, texts

SECRETS = {
    "HF_TOKEN": "x",
    "WANDB_API_KEY": "local",
    "A": "hf_" + "a1B" * 8,
    "B": "0123456789abcdef0123456789abcdef01234567",
    "C": "postgres://me:hunter2@db/runs",
    "D": "AKIA" + "A1" * 8,
    "PASSWORD": "1",
}
PLAIN = {
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_DEBUG": "WARN",
    "AWS_SHARED_CREDENTIALS_FILE": "/etc/aws",
    "SSH_KEY_PATH": "~/.ssh/id",
    "HF_HOME": "/data/huggingface/cache/of/the/whole/team",
    "URL": "https://example.org:8443/path",
    "HF_TOKEN": "",
    "MODEL": "meta-llama/Llama-3.2-11B-Vision-Instruct",
}


@pytest.mark.parametrize(("name", "value"), SECRETS.items())
def test_a_secret_is_recognised_by_its_name_or_its_value(name: str, value: str) -> None:
    assert is_secret(name, value)


@pytest.mark.parametrize(("name", "value"), PLAIN.items())
def test_other_values_are_none(name: str, value: str) -> None:
    assert not is_secret(name, value)


def test_a_token_is_named_by_its_first_characters_only() -> None:
    assert known_token(f"login --token {SECRETS['A']}") == "hf_a1B…"
    assert "hunter2" not in known_token(SECRETS["C"])


def test_every_text_of_a_document_has_a_path() -> None:
    assert dict(texts({"a": {"b": ["x", {"c": "y"}]}, "d": 1})) == {"a.b[0]": "x", "a.b[1].c": "y"}
