"""Plugins: what activates them, what is refused, and who is blamed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import define, field, frozen

from forge_core.contracts.components import Component, Plugin, TrainingHook
from forge_core.contracts.errors import PluginError, Problem
from forge_core.contracts.hookspecs import hookimpl, hookspec
from forge_core.contracts.layout import Layout
from forge_core.engine.build import build_context
from forge_core.plugins.manager import Plugins
from forge_testing import TinyModel
from forge_testing.refusals import lacks, naming


@define(kw_only=True, slots=False)
class Scaled(Plugin):
    """Wraps the model builder: scales the head's initial spread, and notes the order of calls."""

    std: float = 0.5
    calls: list[str] = field(init=False, factory=list)

    @hookimpl(wrapper=True)
    def forge_build_model(self):
        model = yield
        self.calls.append("model")
        model.head.std = self.std
        return model


def test_a_wrapper_transforms_what_any_component_builds(make_job, build):
    plain = build(make_job()).model.head.weight.std().item()
    wrapped = build(make_job(plugins={"scaled": Scaled(std=2.0)})).model.head.weight.std().item()
    assert wrapped == pytest.approx(10 * plain, rel=0.01), "0.2 became 2.0"


def test_an_implementation_may_answer_instead_of_the_component(make_job, build):
    @define(kw_only=True, slots=False)
    class Instead(Plugin):
        @hookimpl
        def forge_build_scheduler(self):
            return lambda step, total: 0.25

    run = build(make_job(plugins={"instead": Instead()}))
    assert run.rates.apply(0, 0) == 0.0025


@define(kw_only=True, slots=False)
class Named(Plugin):
    """A wrapper that notes its name on the way out."""

    name: str
    order: list[str]

    @hookimpl(wrapper=True)
    def forge_build_loss(self):
        self.order.append(self.name)
        return (yield)


def test_plugins_are_called_in_the_order_of_the_job(make_job, build):
    order: list[str] = []
    build(make_job(plugins={name: Named(name=name, order=order) for name in ("z", "a", "m")}))
    assert order == ["z", "a", "m"]


def test_a_plugin_contributes_problems(make_job, catalog):
    @define(kw_only=True, slots=False)
    class Careful(Plugin):
        @hookimpl
        def forge_validate_job(self, job):
            if job.train.grad_clip_norm > 1:
                yield Problem("train.grad_clip_norm", "must be at most 1")

    job = make_job(grad_clip_norm=2.0, plugins={"careful": Careful()})
    plugins = Plugins(job.plugins, catalog)
    assert list(plugins.validate_job(job, Layout())) == [Problem("train.grad_clip_norm", "must be at most 1")]


def refused(make_job, catalog, cls):
    with pytest.raises(PluginError) as caught:
        Plugins({"p": cls()}, catalog)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("plugin 'p' (")
    return str(caught.value)


def plugin(**methods):
    return define(kw_only=True, slots=False)(type("Made", (Plugin,), methods))


def test_a_misspelt_hook_is_refused_with_a_suggestion(make_job, catalog):
    @hookimpl
    def forge_build_modle(self, context):
        """Misspelt."""

    message = refused(make_job, catalog, plugin(forge_build_modle=forge_build_modle))
    assert not lacks(message, "'forge_build_modle'", "'forge_build_model'")


def test_an_argument_that_the_specification_lacks_is_refused(make_job, catalog):
    @hookimpl
    def forge_build_model(self, contxt):
        """Misspelt argument."""

    message = refused(make_job, catalog, plugin(forge_build_model=forge_build_model))
    assert "forge_build_model" in message
    assert "contxt" in message


def test_equal_plugins_of_two_tables_are_refused(catalog):
    @hookimpl
    def forge_training_hooks(self, job):
        """Has a hook, as a plugin must."""
        return []

    cls = plugin(forge_training_hooks=forge_training_hooks)
    with pytest.raises(PluginError) as caught:
        Plugins({"first": cls(), "second": cls()}, catalog)
    assert not lacks(str(caught.value), "'first'", "'second'", "remove one")


def test_a_plugin_without_hooks_is_refused(make_job, catalog):
    message = refused(make_job, catalog, plugin(forge_build_model=lambda self: None))
    assert not lacks(message, "no hook", "@forge_core.hookimpl")


@pytest.mark.parametrize(
    ("implementation", "parameter"),
    [
        (lambda self, *, context: None, "context"),
        (lambda self, context=None: None, "context=None"),
        (lambda self, **inputs: None, "**inputs"),
    ],
)
def test_parameters_that_would_never_be_passed_are_refused(make_job, catalog, implementation, parameter):
    message = refused(make_job, catalog, plugin(forge_build_model=hookimpl(implementation)))
    assert not lacks(message, repr(parameter))


def test_an_exception_names_the_plugin_it_came_through(make_job, build):
    @define(kw_only=True, slots=False)
    class Fails(Plugin):
        @hookimpl(wrapper=True)
        def forge_build_model(self):
            yield
            raise ValueError("no adapters here")

    with pytest.raises(ValueError, match="no adapters here") as caught:
        build(make_job(plugins={"lora": Fails(), "scaled": Scaled()}))
    assert any(note.startswith("in plugin 'lora' (") for note in caught.value.__notes__)
    assert not any("'scaled'" in note for note in caught.value.__notes__)


def test_an_exception_in_a_component_names_it(make_job, build):
    @frozen(kw_only=True)
    class Fails(TinyModel):
        def build(self, context):
            raise ValueError("too small")

    with pytest.raises(ValueError, match="too small") as caught:
        build(make_job(model=Fails()))
    assert any(not lacks(note, "model", "Fails") for note in caught.value.__notes__)


def test_a_builder_that_gives_nothing_is_refused(make_job, build):
    @frozen(kw_only=True)
    class Nothing(TinyModel):
        def build(self, context):
            return None

    with pytest.raises(PluginError, match=r"\bmodel '.*Nothing'.*\bNone\b"):
        build(make_job(model=Nothing()))


class NormComponent(Component):
    """Base of a kind that a plugin declares."""

    kind = "test_norm"


@frozen(kw_only=True)
class Unit(NormComponent):
    def build(self, context, dim):
        return f"unit of {dim}"


class Specifications:
    @hookspec(firstresult=True)
    def forge_build_test_norm(self, component, context, dim):
        """Build a norm."""


@define(kw_only=True, slots=False)
class Declares(Plugin):
    @hookimpl
    def forge_add_hookspecs(self):
        return Specifications


@define(kw_only=True, slots=False)
class Implements(Plugin):
    @hookimpl(wrapper=True)
    def forge_build_test_norm(self, dim):
        return f"({(yield)}, wrapped at {dim})"


@pytest.mark.parametrize("names", [("declares", "implements"), ("implements", "declares")])
def test_a_plugin_adds_a_specification_that_another_implements(make_job, catalog, tmp_path, names):
    plugins = {"declares": Declares(), "implements": Implements()}
    context = build_context(make_job(plugins={name: plugins[name] for name in names}), catalog, tmp_path)
    assert context.build(Unit(), dim=3) == "(unit of 3, wrapped at 3)"


def test_without_the_declaring_plugin_the_implementation_is_refused(make_job, catalog):
    with pytest.raises(PluginError, match=naming("'implements'", "'forge_build_test_norm'")):
        Plugins({"implements": Implements()}, catalog)


def test_an_implementation_that_does_not_fit_anothers_specification_is_blamed_on_its_own_plugin(make_job, catalog):
    @define(kw_only=True, slots=False)
    class Misfit(Plugin):
        @hookimpl
        def forge_build_test_norm(self, width):
            """The specification has `dim`."""

    with pytest.raises(PluginError, match=r"^plugin 'misfit' \(.*width"):
        Plugins({"declares": Declares(), "misfit": Misfit()}, catalog)


@pytest.mark.parametrize("declared", [SimpleNamespace(), None])
def test_a_declaration_without_specifications_is_blamed_on_its_own_plugin(make_job, catalog, declared):
    refused(make_job, catalog, plugin(forge_add_hookspecs=hookimpl(lambda self: declared)))


def test_builds_within_builds_each_receive_their_own_inputs(make_job, catalog, tmp_path):
    @frozen(kw_only=True)
    class Outer(NormComponent):
        def build(self, context, dim):
            return f"{context.build(Unit(), dim=2 * dim)} in {dim}"

    context = build_context(make_job(plugins={"declares": Declares()}), catalog, tmp_path)
    assert context.build(Outer(), dim=3) == "unit of 6 in 3"


def test_a_context_names_the_type_of_a_component(make_job, catalog, tmp_path):
    job = make_job()
    assert build_context(job, catalog, tmp_path).type_of(job.loss) == "forge-run/cross_entropy"


def test_the_state_of_a_plugin_travels_with_the_checkpoint(make_job, train):
    @define(kw_only=True, slots=False)
    class Counts(Plugin):
        steps: int = field(init=False, default=0)

        @hookimpl
        def forge_training_hooks(self):
            owner = self

            class Hook(TrainingHook):
                def on_step_end(self, context):
                    owner.steps += 1

            return [Hook()]

    train(make_job(steps=2, plugins={"counts": Counts()}))
    second = Counts()
    train(make_job(steps=5, plugins={"counts": second}))
    assert second.steps == 5


def test_a_plugin_configures_the_process_until_the_next_job(make_job, catalog, tmp_path):
    events: list[str] = []

    @define(kw_only=True, slots=False)
    class Configures(Plugin):
        @hookimpl
        def forge_configure_backend(self, device):
            events.append(f"on {device.type}")
            return lambda: events.append("undone")

    build_context(make_job(plugins={"c": Configures()}), catalog, tmp_path)
    assert events == ["on cpu"]
    build_context(make_job(), catalog, tmp_path)
    assert events == ["on cpu", "undone"]
    build_context(make_job(), catalog, tmp_path)
    assert events == ["on cpu", "undone"], "once"
