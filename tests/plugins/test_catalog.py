"""The catalog: what is installed, which of it a job means, and what is said when that fails.

Distributions are real: `dist-info` folders beside modules in a temporary folder on `sys.path`, found by the same scan
as what pip installs.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from forge_core.contracts.components import LossComponent, OptimizerComponent, RouterComponent
from forge_core.contracts.errors import ExitCode, PluginError
from forge_core.plugins.catalog import (
    REPLACES,
    Catalog,
    Distribution,
    Offer,
    UnknownTypeError,
    check_requirement,
    core_version,
    declared_entry_points,
)
from forge_testing.catalogs import with_components
from forge_testing.refusals import lacks, naming

Install = Callable[..., Path]

OPTIMIZER = """
from attrs import frozen
from forge_core import OptimizerComponent

@frozen(kw_only=True)
class {name}(OptimizerComponent):
    lr: float = 0.5
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path`. What was imported from it is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    """Install a distribution: entry points by group, modules by name."""

    def put(
        name: str,
        groups: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] | None = None,
        version: str = "1.0",
        requires: tuple[str, ...] = (),
        editable: Path | None = None,
        folder: Path | None = None,
    ) -> Path:
        info = (folder or site) / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        names = {group: group if group == REPLACES else f"forge.{group}" for group in groups}
        entries = [
            f"[{names[group]}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(entries))
        if editable is not None:
            url = {"url": editable.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(url))
        for module, source in (modules or {}).items():
            (site / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        return info

    return put


def load(type_: str, kind: str = "optimizer") -> Any:
    return Catalog.installed().load(kind, type_)


def message_of(type_: str, kind: str = "optimizer") -> str:
    with pytest.raises(PluginError) as caught:
        load(type_, kind)
    return str(caught.value)


class TestDiscovery:
    def test_what_is_installed_is_known_without_importing_it(self, install: Install) -> None:
        install("forge-plugin-lazy", {"optimizer": {"lazy": "forge_lazy:Lazy"}}, {"forge_lazy": "raise SystemExit"})
        assert "lazy" in Catalog.installed().types("optimizer")
        assert "forge_lazy" not in sys.modules

    def test_one_scan_reads_each_distribution_once(self, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
        from importlib import metadata

        install("forge-plugin-one", {"optimizer": {"one": "a:A"}, "router": {"one": "a:B"}})
        scans = []
        monkeypatch.setattr(metadata, "distributions", lambda scan=metadata.distributions: scans.append(1) or scan())
        catalog = Catalog.installed()
        assert catalog.types("optimizer")
        assert catalog.types("kind")
        assert list(catalog.offers())
        assert scans == [1]

    def test_only_what_is_loaded_is_imported(self, install: Install) -> None:
        install("forge-plugin-a", {"optimizer": {"aa": "forge_aa:AA"}}, {"forge_aa": OPTIMIZER.format(name="AA")})
        install("forge-plugin-b", {"optimizer": {"bb": "forge_bb:BB"}}, {"forge_bb": OPTIMIZER.format(name="BB")})
        catalog = Catalog.installed()
        catalog.load("optimizer", "aa")
        assert "forge_aa" in sys.modules
        assert "forge_bb" not in sys.modules

    def test_a_second_copy_further_down_the_path_is_hidden(self, install: Install, tmp_path: Path) -> None:
        install("forge-plugin-twice", {"optimizer": {"twice": "x:New"}}, version="2.0")
        older = tmp_path / "older"
        install("forge_plugin.twice", {"optimizer": {"twice": "x:Old"}}, version="1.0", folder=older)
        sys.path.append(str(older))
        try:
            [offer] = [o for o in Catalog.installed().offers("optimizer") if o.type == "twice"]
        finally:
            sys.path.remove(str(older))
        assert (offer.value, offer.distribution.version) == ("x:New", "2.0")

    def test_a_damaged_distribution_that_is_not_named_hurts_nobody(self, install: Install) -> None:
        info = install("forge-plugin-half", {"optimizer": {"half": "x:Y"}})
        (info / "METADATA").unlink()
        install("forge-plugin-whole", {"optimizer": {"whole": "forge_w:W"}}, {"forge_w": OPTIMIZER.format(name="W")})
        assert load("whole").__name__ == "W"

    def test_the_core_is_the_first_plugin(self) -> None:
        catalog = Catalog.installed()
        [offer] = [o for o in catalog.offers("loss") if o.type == "cross_entropy"]
        assert offer.qualified == "forge-run/cross_entropy"
        assert catalog.kind_base("router") is RouterComponent


class TestSelection:
    def test_a_type_a_qualified_type_and_a_dotted_path_give_the_same_class(self, install: Install) -> None:
        install("forge-plugin-x", {"optimizer": {"xx": "forge_x:X"}}, {"forge_x": OPTIMIZER.format(name="X")})
        assert load("xx") is load("forge-plugin-x/xx") is load("Forge_Plugin.X/xx") is load("forge_x:X")

    def test_a_type_may_be_qualified_by_a_distribution_that_another_has_replaced(self, install: Install) -> None:
        groups = {"optimizer": {"xx": "forge_x:X"}, REPLACES: {"forge-plugin-old": "forge_x"}}
        install("forge-plugin-x", groups, {"forge_x": OPTIMIZER.format(name="X")})
        catalog = Catalog.installed()
        assert catalog.load("optimizer", "Forge_Plugin.Old/xx") is catalog.load("optimizer", "xx")
        assert catalog.type_of(catalog.load("optimizer", "forge-plugin-old/xx")) == "forge-plugin-x/xx"
        assert "forge-plugin-old" not in {offer.type for offer in catalog.offers()}
        assert not lacks(message_of("forge-plugin-older/xx"), "forge-plugin-older is not installed")

    def test_a_single_type_may_have_moved_and_the_others_stay(self, install: Install) -> None:
        modules = {"forge_x": OPTIMIZER.format(name="X"), "forge_y": OPTIMIZER.format(name="Y")}
        install("forge-plugin-x", {"optimizer": {"stays": "forge_x:X"}, REPLACES: {"forge-plugin-old": "x"}}, modules)
        moved = {"Forge.Plugin-X/has_moved": "forge_y"}
        install("forge-plugin-y", {"optimizer": {"has_moved": "forge_y:Y"}, REPLACES: moved})
        catalog = Catalog.installed()
        for owner in ("forge-plugin-x", "forge_plugin_x", "forge-plugin-y", "forge-plugin-old"):
            assert catalog.as_spelled_now(f"{owner}/has_moved") == "forge-plugin-y/has_moved"
            assert catalog.type_of(catalog.load("optimizer", f"{owner}/has_moved")) == "forge-plugin-y/has_moved"
        assert catalog.as_spelled_now("forge-plugin-old/stays") == "forge-plugin-x/stays"
        assert catalog.as_spelled_now("forge-plugin-old") == "forge-plugin-x"
        for same in ("has_moved", "stays", "forge-plugin-x", "forge-plugin-x/stays", "./has_moved.py:X"):
            assert catalog.as_spelled_now(same) == same
        assert not lacks(message_of("forge-plugin-y/stays"), "'forge-plugin-y/stays'")

    def test_a_first_party_type_by_an_old_place_comes_with_the_line_that_installs_the_new_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metadata, "distributions", lambda **_: [])  # none of them is installed
        for name in ("forge-plugin-images/answers", "forge-plugin-vision/looking", "forge-plugin-vlm-eval/anls"):
            message = message_of(name, "evaluation")
            assert not lacks(message, "forge-plugin-vlm-eval is not installed", "pip install forge-plugin-vlm-eval")
        assert not lacks(message_of("forge-plugin-video/fps", "frame_sampling"), "pip install forge-plugin-images")

    def test_two_distributions_that_claim_a_type_are_an_error_only_if_it_is_named(self, install: Install) -> None:
        modules = {"forge_p": OPTIMIZER.format(name="P"), "forge_q": OPTIMIZER.format(name="Q")}
        install("forge-plugin-p", {"optimizer": {"both": "forge_p:P", "own": "forge_p:P"}}, modules)
        install("forge-plugin-q", {"optimizer": {"both": "forge_q:Q"}}, version="2.0")
        assert load("own").__name__ == "P"
        assert load("forge-plugin-q/both").__name__ == "Q"
        choices = ('type = "forge-plugin-p/both"', 'type = "forge-plugin-q/both"')
        assert not lacks(message_of("both"), "optimizer 'both'", "forge-plugin-p 1.0", "forge-plugin-q 2.0", *choices)

    def test_a_name_that_the_core_has_is_no_exception(self, install: Install) -> None:
        install("forge-plugin-z", {"scheduler": {"constant": "forge_z:Z"}})
        offers = ("forge-plugin-z 1.0", f"forge-run {core_version()}")
        choices = ('type = "forge-plugin-z/constant"', 'type = "forge-run/constant"')
        assert not lacks(message_of("constant", "scheduler"), "scheduler 'constant'", *offers, *choices)

    def test_an_unknown_type_tells_what_is_there(self, install: Install) -> None:
        offers = [Offer("optimizer", name, "x:Y", Distribution("d", "1")) for name in ("muon", "adamw")]
        with pytest.raises(UnknownTypeError) as caught:
            Catalog(offers).load("optimizer", "moun")
        assert not lacks(str(caught.value), "optimizer 'moun'", "'muon'", "Installed: adamw, muon")

    @pytest.mark.parametrize(
        ("type_", "distribution"),
        [
            ("lion", "forge-plugin-lion"),  # one of Forge's own
            ("Lion", "forge-plugin-lion"),
            ("sophia", ""),  # nobody knows a distribution that has it
            ("acme-optimizers/sophia", "acme-optimizers"),
            ("moun", ""),  # more likely misspelt
            ("d/sophia", ""),  # d is installed, and does not have it
        ],
    )
    def test_an_unknown_type_tells_what_to_install_where_it_can(self, type_: str, distribution: str) -> None:
        dist = Distribution("d", "1")
        with pytest.raises(UnknownTypeError) as caught:
            Catalog([Offer("optimizer", "muon", "x:Y", dist)]).load("optimizer", type_)
        assert caught.value.distribution == distribution

    def test_a_first_party_type_that_is_not_installed_comes_with_the_line_that_installs_it(self) -> None:
        catalog = Catalog([Offer("optimizer", "soap", "x:Y", Distribution("d", "1"))])
        with pytest.raises(UnknownTypeError) as caught:
            catalog.load("optimizer", "muon")
        first, second = str(caught.value).splitlines()
        assert not lacks(first, "optimizer 'muon'", "Installed: soap")
        assert second.endswith(": pip install forge-plugin-muon")
        misspelt = naming("'muonn'", "'muon'", "Installed: soap", "pip install forge-plugin-muon")
        with pytest.raises(UnknownTypeError, match=misspelt):
            catalog.load("optimizer", "muonn")
        with pytest.raises(UnknownTypeError, match=naming("kind 'ffn'", "pip install forge-plugin-transformer")):
            catalog.kind_base("ffn")

    def test_a_type_is_looked_up_in_its_own_kind_only(self, install: Install) -> None:
        install("forge-plugin-x", {"optimizer": {"xx": "forge_x:X"}}, {"forge_x": OPTIMIZER.format(name="X")})
        installed = ", ".join(Catalog.installed().types("router")) or "none"
        assert not lacks(message_of("xx", "router"), "router 'xx'", f"Installed: {installed}")


class TestLoading:
    def test_a_broken_plugin_names_distribution_version_entry_point_and_cause(self, install: Install) -> None:
        install("forge-plugin-bad", {"optimizer": {"bad": "forge_bad:Bad"}}, {"forge_bad": "import no_such_package"})
        cause = "ModuleNotFoundError: No module named 'no_such_package'"
        assert not lacks(message_of("bad"), "optimizer 'bad'", "forge-plugin-bad 1.0", "forge_bad:Bad", cause)

    def test_a_class_that_is_gone_is_told(self, install: Install) -> None:
        install("forge-plugin-gone", {"optimizer": {"gone": "forge_gone:Gone"}}, {"forge_gone": ""})
        assert not lacks(message_of("gone"), "(forge_gone:Gone): AttributeError", "'Gone'")

    def test_the_class_must_be_of_the_kind(self, install: Install) -> None:
        install("forge-plugin-odd", {"router": {"odd": "forge_odd:Odd"}}, {"forge_odd": OPTIMIZER.format(name="Odd")})
        assert not lacks(message_of("odd", "router"), "router 'odd'", "forge-plugin-odd 1.0", "RouterComponent")

    @pytest.mark.parametrize(
        "source", ["lr: float = 1.0", "note: str = 'fields of a subclass need a decorator of its own'"]
    )
    def test_an_undecorated_class_with_fields_is_refused(self, install: Install, source: str) -> None:
        text = f"from forge_core import OptimizerComponent\nclass Bare(OptimizerComponent):\n    {source}\n"
        install("forge-plugin-bare", {"optimizer": {"bare": "forge_bare:Bare"}}, {"forge_bare": text})
        fix = "@attrs.frozen(kw_only=True)"
        assert not lacks(message_of("bare"), "optimizer 'bare'", "forge-plugin-bare 1.0", fix)


class TestPaths:
    def test_a_local_file_is_loaded_and_its_digest_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import hashlib

        monkeypatch.chdir(tmp_path)
        file = tmp_path / "mine.py"
        file.write_text(OPTIMIZER.format(name="Mine"))
        catalog = Catalog.installed()
        cls = catalog.load("optimizer", "./mine.py:Mine")
        assert issubclass(cls, OptimizerComponent)
        assert catalog.files == {str(file): hashlib.sha256(file.read_bytes()).hexdigest()}
        assert catalog.type_of(cls) == f"{file}:Mine"

    def test_a_file_that_changed_is_loaded_afresh(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text(OPTIMIZER.format(name="Mine"))
        first = load(f"{file}:Mine")
        file.write_text(OPTIMIZER.format(name="Mine").replace("0.5", "0.7"))
        assert (first().lr, load(f"{file}:Mine")().lr) == (0.5, 0.7)

    def test_a_class_has_one_spelling_by_whichever_path_it_was_loaded(self, site: Path) -> None:
        package = site / "research"
        package.mkdir()
        (package / "ideas.py").write_text(OPTIMIZER.format(name="Idea"))
        (package / "__init__.py").write_text("from research.ideas import Idea\n")
        catalog = Catalog.installed()
        for path in ("research:Idea", "research.ideas:Idea"):
            assert catalog.type_of(catalog.load("optimizer", path)) == "research.ideas:Idea"

    @pytest.mark.parametrize(
        ("type_", "reason"),
        [
            ("no_such_module:X", ["ModuleNotFoundError", "'no_such_module'"]),
            ("json:NoClass", ["AttributeError", "'NoClass'"]),
            ("./nowhere.py:X", ["FileNotFoundError", "nowhere.py"]),
        ],
    )
    def test_what_is_not_there_is_told(self, type_: str, reason: list[str]) -> None:
        assert not lacks(message_of(type_), "optimizer", repr(type_), *reason)

    def test_a_file_that_fails_leaves_nothing_behind(self, tmp_path: Path) -> None:
        (tmp_path / "bad.py").write_text("1 / 0")
        assert "ZeroDivisionError" in message_of(f"{tmp_path / 'bad.py'}:X")
        assert [name for name in sys.modules if name.startswith("forge_local_bad")] == []


@frozen(kw_only=True)
class InMemory(OptimizerComponent):
    lr: float = 1.0


class TestSpelling:
    """`type_of`, which the resolved job and the provenance are written with."""

    def test_loaded_classes_are_qualified(self, install: Install) -> None:
        install("forge-plugin-x", {"optimizer": {"xx": "forge_x:X"}}, {"forge_x": OPTIMIZER.format(name="X")})
        catalog = Catalog.installed()
        assert catalog.type_of(catalog.load("optimizer", "xx")) == "forge-plugin-x/xx"

    def test_classes_that_were_imported_are_recognised_even_by_a_re_export(self, install: Install, site: Path) -> None:
        package = site / "forge_pack"
        package.mkdir()
        (package / "inner.py").write_text(OPTIMIZER.format(name="Inner"))
        (package / "__init__.py").write_text("from forge_pack.inner import Inner\n")
        install("forge-plugin-pack", {"optimizer": {"inner": "forge_pack:Inner"}})
        catalog = Catalog.installed()
        assert catalog.type_of(importlib.import_module("forge_pack").Inner) == "forge-plugin-pack/inner"

    def test_classes_that_nothing_offers_are_spelled_by_their_path(self) -> None:
        assert Catalog([]).type_of(InMemory) == f"{__name__}:InMemory"

    def test_components_given_in_memory_belong_to_the_distribution_named(self) -> None:
        catalog = with_components(Catalog.installed(), {"optimizer": {"mine": InMemory}}, "my-notebook")
        assert catalog.load("optimizer", "mine") is InMemory
        assert catalog.type_of(InMemory) == "my-notebook/mine"


class TestRequirements:
    @pytest.mark.parametrize(
        ("specifier", "upgrade"),
        [
            (">=99", "forge-run"),
            (">=99,<100", "forge-run"),
            ("==99.*", "forge-run"),
            ("<0.0.1", "forge-plugin-old"),
            ("==0.0.1", "forge-plugin-old"),
            ("~=0.0.1", "forge-plugin-old"),
        ],
    )
    def test_a_mismatch_with_the_core_says_which_side_to_upgrade(self, specifier: str, upgrade: str) -> None:
        with pytest.raises(PluginError) as caught:
            check_requirement(Distribution("forge-plugin-old", "1.0", (f"Forge_Run{specifier}",)))
        facts = ("forge-plugin-old 1.0", f"forge-run {core_version()}", f"pip install --upgrade {upgrade}")
        assert not lacks(str(caught.value), *facts)

    @pytest.mark.parametrize(
        "line", [f"forge-run=={core_version()}", "forge-run", "forge-run<0.0.1; extra == 'old'", "numpy>=99"]
    )
    def test_others_pass(self, line: str) -> None:
        check_requirement(Distribution("forge-plugin-new", "1.0", (line,)))

    def test_it_is_checked_before_anything_is_imported(self, install: Install) -> None:
        install(
            "forge-plugin-old", {"optimizer": {"old": "forge_old:Old"}}, {"forge_old": ""}, requires=("forge-run>=99",)
        )
        assert not lacks(message_of("old"), "forge-plugin-old 1.0", "forge-run>=99", f"forge-run {core_version()}")
        assert "forge_old" not in sys.modules

    def test_a_requirement_that_cannot_be_read_is_told(self) -> None:
        with pytest.raises(PluginError, match=naming("d 1", "requirement", "'!!'")):
            check_requirement(Distribution("d", "1", ("!!",)))


class TestEditableInstalls:
    def test_a_type_that_came_after_installing_gives_the_command_that_refreshes(
        self, install: Install, tmp_path: Path
    ) -> None:
        source = tmp_path / "a folder with spaces"
        source.mkdir()
        (source / "pyproject.toml").write_text('[project.entry-points."forge.optimizer"]\nnewest = "x:Y"\n')
        install("forge-plugin-live", {"optimizer": {"older": "x:Z"}}, editable=source)
        facts = ("optimizer 'newest'", "pyproject.toml", "forge-plugin-live 1.0", f"pip install --no-deps -e {source}")
        assert not lacks(message_of("newest"), *facts)
        assert not lacks(message_of("forge-plugin-live/newest"), *facts[1:])
        assert "pyproject.toml" not in message_of("forge-run/newest")
        with pytest.raises(UnknownTypeError) as caught:
            load("newest")
        assert caught.value.distribution == ""

    def test_a_pyproject_that_is_no_toml_does_not_hide_the_message(self, install: Install, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text("[[[")
        install("forge-plugin-live", {"optimizer": {"older": "x:Z"}}, editable=tmp_path)
        distribution = Catalog.installed().distribution("forge-plugin-live")
        assert distribution is not None
        assert distribution.editable_path == tmp_path
        assert declared_entry_points(distribution) == {}
        assert not lacks(message_of("newest"), "optimizer 'newest'", "Installed")

    def test_installs_that_are_not_editable_have_no_source_folder(self) -> None:
        assert Distribution("d", "1").editable_path is None
        assert (
            Distribution("d", "1", (), '{"url": "https://example.org/d.whl", "archive_info": {}}').editable_path is None
        )


class TestKinds:
    BASE = "from forge_core import Component\nclass Probe(Component):\n    kind = 'probe'\n"

    def test_a_plugin_declares_a_kind_and_another_offers_a_component(self, install: Install) -> None:
        imports = "from attrs import frozen\nfrom forge_probe import Probe\n"
        linear = imports + "@frozen(kw_only=True)\nclass Linear(Probe):\n    rank: int = 8\n"
        install("forge-plugin-probe", {"kind": {"probe": "forge_probe:Probe"}}, {"forge_probe": self.BASE})
        install("forge-plugin-linear", {"probe": {"linear": "forge_linear:Linear"}}, {"forge_linear": linear})
        catalog = Catalog.installed()
        assert "probe" in catalog.types("kind")
        assert catalog.load("probe", "linear")().rank == 8

    def test_a_build_that_cannot_be_called_is_refused_when_it_is_named(self, install: Install) -> None:
        text = OPTIMIZER.format(name="Alone") + "    def build(self):\n        return None\n"
        install("forge-plugin-alone", {"optimizer": {"alone": "forge_alone:Alone"}}, {"forge_alone": text})
        facts = ("optimizer 'alone'", "forge-plugin-alone 1.0", "build(self, context, parameters)")
        assert not lacks(message_of("alone"), *facts)

    def test_two_owners_are_an_error_once_the_kind_is_needed(self, install: Install) -> None:
        entry = {"kind": {"probe": "forge_probe:Probe"}}
        install("forge-plugin-probe", entry, {"forge_probe": self.BASE})
        install("forge-plugin-rival", entry)
        catalog = Catalog.installed()
        assert catalog.load("loss", "cross_entropy", LossComponent)
        with pytest.raises(PluginError) as caught:
            catalog.load("probe", "linear", importlib.import_module("forge_probe").Probe)
        assert not lacks(str(caught.value), "kind 'probe'", "forge-plugin-probe 1.0", "forge-plugin-rival 1.0")

    def test_an_undeclared_kind_is_told_with_those_there_are(self) -> None:
        with pytest.raises(PluginError, match=naming("kind 'prob'", "optimizer", "scheduler")):
            Catalog.installed().kind_base("prob")

    def test_the_base_must_carry_its_kind(self, install: Install) -> None:
        install("forge-plugin-probe", {"kind": {"prob": "forge_probe:Probe"}}, {"forge_probe": self.BASE})
        with pytest.raises(PluginError) as caught:
            Catalog.installed().kind_base("prob")
        assert not lacks(str(caught.value), "forge_probe:Probe", "forge-plugin-probe 1.0", "kind = 'prob'")


class TestRuns:
    """What a user meets at the command line."""

    JOB = """
[model]
type = "no_such_model"
[train]
steps = 1
global_batch_size = 1
seq_len = 4
[data]
sources = []
[optimizer]
type = "{optimizer}"
"""

    def check(self, site: Path, tmp_path: Path, optimizer: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "job.toml").write_text(self.JOB.format(optimizer=optimizer))
        program = f"import sys; sys.path.insert(0, {str(site)!r}); from forge_core.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "check", "job.toml"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    def test_an_installed_plugin_that_is_broken_hurts_only_who_names_it(
        self, install: Install, site: Path, tmp_path: Path
    ) -> None:
        install("forge-plugin-bad", {"optimizer": {"bad": "forge_bad:Bad"}}, {"forge_bad": "raise OSError('no CUDA')"})
        install("forge-plugin-fine", {"optimizer": {"fine": "forge_f:F"}}, {"forge_f": OPTIMIZER.format(name="F")})
        unnamed = self.check(site, tmp_path, "fine")
        assert "forge-plugin-bad" not in unnamed.stderr
        named = self.check(site, tmp_path, "bad")
        assert named.returncode == ExitCode.BAD_JOB
        [line] = [text for text in named.stderr.splitlines() if text.startswith("job.toml:11: optimizer.type: ")]
        assert not lacks(line, "'bad'", "forge-plugin-bad 1.0", "forge_bad:Bad", "OSError: no CUDA")
        assert "Traceback" not in named.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "site"], "nothing was created"
