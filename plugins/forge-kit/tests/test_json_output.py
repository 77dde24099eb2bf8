"""JSON of commands: any reader can parse it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from forge_kit.tools.json_output import json_text, only_json, print_json


def test_numbers_that_json_does_not_have_are_strings() -> None:
    facts = {"loss": [float("nan"), float("inf"), -float("inf"), 0.5], "step": np.int64(3), "norm": np.float32("nan")}
    strict = json.loads(json_text(facts), parse_constant=lambda name: 1 / 0)
    assert strict == {"loss": ["nan", "inf", "-inf", 0.5], "step": 3, "norm": "nan"}


def test_keys_paths_sets_arrays_and_other_objects_are_plain() -> None:
    facts = {1: Path("runs"), "set": {"b", "a"}, "pair": (1, None), "array": np.ones(2), "code": abs, "yes": True}
    read = json.loads(json_text(facts))
    assert read == {
        "1": "runs",
        "set": ["a", "b"],
        "pair": [1, None],
        "array": [1.0, 1.0],
        "code": str(abs),
        "yes": True,
    }


def test_any_terminal_can_print_it(capsys) -> None:
    print_json({"text": "é \udc80"})
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out)["text"] == "é \udc80"


def test_what_libraries_print_goes_to_standard_error(capsys) -> None:
    for is_json in (True, False):
        with only_json(is_json):
            print("working …")
        captured = capsys.readouterr()
        assert (captured.err if is_json else captured.out) == "working …\n"
