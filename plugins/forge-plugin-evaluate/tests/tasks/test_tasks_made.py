"""Tasks that are made on the spot: their right answers are right, and no wrong one is."""

from __future__ import annotations

import hashlib
import importlib
import inspect

import pytest

from forge_plugin_evaluate.tasks import Arithmetic, Brackets, Copy, Induction, Modules, Recall, Signatures

MADE = [Copy, Induction, Recall, Arithmetic, Brackets, Modules, Signatures]
PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


@pytest.mark.parametrize("task", MADE)
def test_items_are_as_many_as_asked_the_same_each_time_and_others_with_another_seed(task):
    items = task(items=30).load()
    assert len(items) == 30
    assert task(items=30).load() == items
    assert task(items=30, seed=1).load() != items


@pytest.mark.parametrize("task", MADE)
def test_choices_differ_and_the_right_one_stands_anywhere(task):
    items = task(items=60).load()
    assert all(len(set(item.choices)) == len(item.choices) == 4 for item in items)
    assert {item.answer for item in items} == {0, 1, 2, 3}


def test_random_tasks_are_the_same_on_every_machine():
    items = [item for task in (Copy, Induction, Recall, Arithmetic, Brackets) for item in task(items=20).load()]
    digest = hashlib.sha256(repr([(i.context, i.choices, i.answer) for i in items]).encode()).hexdigest()
    assert digest[:16] == "d8a3582349fb6c5d"


def right(item):
    return item.choices[item.answer].strip()


def wrong(item):
    return [choice.strip() for number, choice in enumerate(item.choices) if number != item.answer]


def test_copy():
    for item in Copy(lengths=(1, 5)).load():
        assert item.context == f"{right(item)} ="
        for choice in wrong(item):
            assert sum(one != other for one, other in zip(choice.split(), right(item).split(), strict=True)) == 1


def test_induction():
    for item in Induction().load():
        words = item.context.split()
        again = words.index(words[-1])
        assert words[: again + 1] == words[-again - 1 :]
        assert words[again + 1] == right(item)
        assert set(wrong(item)) <= set(words)


def test_recall():
    for item in Recall().load():
        *lines, asked = item.context.splitlines()
        table = dict(line.split(": ") for line in lines)
        assert table[asked.removesuffix(":")] == right(item)
        assert set(wrong(item)) <= set(table.values()) - {right(item)}


def test_arithmetic():
    for item in Arithmetic(digits=(1, 4)).load():
        *worked, asked = item.context.splitlines()
        for line in [*worked, f"{asked} {right(item)}"]:
            left, total = line.split(" = ") if " = " in line else line.split(" =")
            one, other = left.split(" + ")
            assert int(one) + int(other) == int(total)
            assert len(one) == len(other)
        assert all(int(choice) >= 0 for choice in wrong(item))


def test_numbers_have_no_more_digits_than_python_writes():
    assert len(right(Arithmetic(items=1, digits=(4000,)).load()[0])) >= 4000
    with pytest.raises(ValueError, match="4000"):
        Arithmetic(digits=(4001,))


def test_brackets():
    for item in Brackets(lengths=(1, 7, 20)).load():
        opened = []
        for bracket in item.context.split():
            if bracket in PAIRS:
                opened.append(bracket)
            else:
                assert PAIRS[opened.pop()] == bracket
        assert PAIRS[opened[-1]] == right(item)


def test_modules_have_the_function_and_others_have_not():
    for item in Modules().load():
        name = item.context.split()[2]
        assert callable(getattr(importlib.import_module(right(item)), name))
        assert not any(hasattr(importlib.import_module(choice), name) for choice in wrong(item))


def test_signatures_are_those_of_the_library():
    for item in Signatures(items=20).load():
        summary = item.context.removeprefix("# ").removesuffix("\ndef")
        name, _, rest = right(item).partition("(")
        known = [importlib.import_module(module) for module in library_modules() if module]
        functions = [getattr(module, name) for module in known if inspect.isroutine(getattr(module, name, None))]
        documented = [f for f in functions if (inspect.getdoc(f) or "").startswith(summary)]
        assert any(f"({rest}" == f"{inspect.signature(f)}:" for f in documented)


def library_modules():
    from forge_plugin_evaluate.tasks.library import MODULES

    return MODULES


@pytest.mark.parametrize("wrong_keys", [{"items": 0}, {"lengths": ()}, {"lengths": (3,)}, {"seed": -1}])
def test_settings_out_of_range_are_refused(wrong_keys):
    with pytest.raises(ValueError, match=r"items|lengths|seed"):
        Induction(**wrong_keys)


def test_a_list_has_no_more_entries_than_there_are_numbers_of_two_digits():
    assert next(iter(Recall(lengths=(90,), items=1).load())).context.count(":") == 91
    with pytest.raises(ValueError, match="lengths"):
        Recall(lengths=(91,))
