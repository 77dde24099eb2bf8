"""`forge-run` itself: finding commands, help, versions, and how errors are shown."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core.cli import command_summary, help_text, main
from forge_core.contracts.errors import CheckpointError, ExitCode, JobError, NonFiniteError, Problem
from forge_core.plugins.catalog import Catalog, Distribution, Offer
from forge_testing.refusals import lacks

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]
HEAVY = {"torch", "numpy", "rich"}
LIGHT = {"forge_core.config.structure", "packaging", "pluggy", *HEAVY}
"""What must not be imported where nothing is read but metadata."""
AUTHOR = {"forge_plugin_author", *(f"forge_plugin_author.{name}" for name in ("plugins", "explain", "error_ids"))}
"""The commands `plugins` and `explain`, which import nothing else of a plugin to list what is installed."""
CORE = Distribution("forge-run", "0.1.0")
LORA = Distribution("forge-plugin-lora", "1.2.0")
Capture = pytest.CaptureFixture[str]
Commands = Callable[..., None]


def finished(argv: list[str]) -> int:
    print("ran with", argv)
    return 0


def raising(error: BaseException) -> Callable[[list[str]], int]:
    def command(argv: list[str]) -> int:
        raise error

    return command


@pytest.fixture
def with_commands(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make `forge-run` find these commands of the core, and no others."""

    def replace(*offers: Offer, **commands: Callable[[list[str]], int]) -> None:
        found = [Offer("command", name, f"somewhere:{name}", CORE, command) for name, command in commands.items()]
        monkeypatch.setattr(Catalog, "installed", classmethod(lambda cls: Catalog([*found, *offers])))

    return replace


class TestDispatch:
    def test_a_job_file_first_means_run(self, with_commands: Commands, capsys: Capture) -> None:
        with_commands(run=finished)
        assert main(["job.toml", "more.toml", "--a.b=1"]) == 0
        assert capsys.readouterr().out == "ran with ['job.toml', 'more.toml', '--a.b=1']\n"

    def test_an_existing_file_or_an_override_first_means_run(
        self, with_commands: Commands, capsys: Capture, tmp_path: Path
    ) -> None:
        with_commands(run=finished)
        (tmp_path / "job").touch()
        assert main([str(tmp_path / "job")]) == main(["--resume=never", "job.toml"]) == 0

    def test_a_command_gets_the_rest_of_the_line(self, with_commands: Commands, capsys: Capture) -> None:
        with_commands(check=finished)
        assert main(["check", "job.toml", "-x"]) == 0
        assert capsys.readouterr().out == "ran with ['job.toml', '-x']\n"

    def test_an_unknown_command_gets_a_suggestion(self, with_commands: Commands, capsys: Capture) -> None:
        with_commands(check=finished, run=finished)
        assert main(["chekc"]) == ExitCode.BAD_JOB
        assert capsys.readouterr().err == "forge-run: 'chekc' is no command and no job file; did you mean 'check'?\n"
        main(["zzz"])
        assert capsys.readouterr().err == "forge-run: 'zzz' is no command and no job file; commands: check, run\n"

    @pytest.mark.parametrize(
        ("command", "distribution"),
        [
            ("plan job.toml", "forge-plugin-plan"),
            ("compare", "forge-plugin-runs"),
            ("data prepare", "forge-plugin-memmap"),
            ("inside lens", "forge-plugin-taps"),
            ("checkpoints runs/mine", "forge-plugin-checkpoints"),
            ("generate", "forge-plugin-generate"),
            ("new-plugin optimizer mine", "forge-plugin-author"),
            ("plugins --check", "forge-plugin-author"),
        ],
    )
    def test_a_first_party_command_that_is_not_installed_comes_with_the_line_that_installs_it(
        self, with_commands: Commands, capsys: Capture, command: str, distribution: str
    ) -> None:
        with_commands(check=finished, run=finished)
        assert main(command.split()) == ExitCode.BAD_JOB
        name = command if command.startswith(("data ", "inside ")) else command.partition(" ")[0]
        [line] = capsys.readouterr().err.splitlines()
        assert not lacks(line, repr(name), f"pip install {distribution}")

    def test_a_misspelt_command_is_recognised_before_it_is_installed(
        self, with_commands: Commands, capsys: Capture
    ) -> None:
        with_commands(check=finished)
        main(["generat"])
        assert capsys.readouterr().err.endswith("; did you mean 'generate'?\n")

    def test_commands_of_two_distributions_need_a_qualified_name(
        self, with_commands: Commands, capsys: Capture
    ) -> None:
        with_commands(Offer("command", "merge", "lora:merge", LORA, finished), merge=finished)
        assert main(["merge"]) == ExitCode.BAD_JOB
        [line] = capsys.readouterr().err.splitlines()
        assert not lacks(line, "'merge'", "forge-run forge-plugin-lora/merge", "forge-run forge-run/merge")
        assert main(["forge-plugin-lora/merge"]) == 0

    def test_a_broken_command_names_its_distribution(self, with_commands: Commands, capsys: Capture) -> None:
        with_commands(Offer("command", "merge", "forge_plugin_lora_gone:merge", LORA))
        assert main(["merge"]) == ExitCode.BAD_JOB
        facts = ("'merge'", "forge-plugin-lora 1.2.0", "forge_plugin_lora_gone:merge", "ModuleNotFoundError")
        assert not lacks(capsys.readouterr().err, *facts)


class TestGroups:
    @pytest.fixture
    def grouped(self, with_commands: Commands) -> None:
        commands = {"inside lens": finished, "inside taps": finished, "data": finished, "data prepare": finished}
        with_commands(**commands)

    @pytest.mark.usefixtures("grouped")
    @pytest.mark.parametrize("argv", [["inside"], ["inside", "--help"], ["inside", "-h"], ["help", "inside"]])
    def test_a_group_lists_its_commands(self, argv: list[str], capsys: Capture) -> None:
        assert main(argv) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["lens", "taps"]

    @pytest.mark.usefixtures("grouped")
    @pytest.mark.parametrize(
        ("argv", "rest"),
        [
            (["inside", "lens", "run", "-x"], ["run", "-x"]),
            (["data", "prepare", "a"], ["a"]),
            (["data", "job.toml"], ["job.toml"]),  # a command that is a group, too
            (["data"], []),
            (["help", "inside", "lens"], ["--help"]),
        ],
    )
    def test_a_command_of_a_group_has_two_words(self, argv: list[str], rest: list[str], capsys: Capture) -> None:
        assert main(argv) == 0
        assert capsys.readouterr().out == f"ran with {rest}\n"

    @pytest.mark.usefixtures("grouped")
    def test_a_misspelt_one_gets_a_suggestion(self, capsys: Capture) -> None:
        assert main(["inside", "lnes"]) == ExitCode.BAD_JOB
        assert capsys.readouterr().err.endswith("did you mean 'inside lens'?\n")


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "code", "text"),
        [
            (JobError([Problem("a.b", "bad", "job.toml:1"), Problem("", "more")]), 2, "job.toml:1: a.b: bad\nmore\n"),
            (CheckpointError("damaged"), 1, "forge-run: damaged\n"),
            (NonFiniteError("nan"), 76, "forge-run: nan\n"),
        ],
    )
    def test_they_are_shown_without_traceback_and_set_the_exit_code(
        self,
        error: Exception,
        code: int,
        text: str,
        with_commands: Commands,
        capsys: Capture,
    ) -> None:
        with_commands(fail=raising(error))
        assert main(["fail"]) == code
        assert capsys.readouterr() == ("", text)

    def test_errors_that_nobody_foresaw_keep_their_traceback(self, with_commands: Commands) -> None:
        with_commands(fail=raising(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            main(["fail"])


def test_a_full_standard_output_is_named_and_not_the_disk_of_the_job() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "forge_core", "plugins"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == ExitCode.FAILED
    assert not lacks(done.stderr, os.strerror(errno.ENOSPC), "standard output")
    assert "job.output" not in done.stderr


def test_a_job_may_come_by_standard_input(tmp_path: Path) -> None:
    job = (ROOT / "configs/smoke.toml").read_text()
    command = [sys.executable, "-m", "forge_core", "check", "-", "--train.seq_len=0"]
    done = subprocess.run(command, input=job, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == ExitCode.BAD_JOB
    assert not lacks(done.stderr, "train.seq_len", 0)
    done = subprocess.run(command[:-1], input=job, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


class TestHelpAndVersion:
    def test_help_lists_the_cores_commands_with_their_help_and_others_by_name(self) -> None:
        check = Offer("command", "check", "forge_kit.tools.check:command", CORE)
        merge = Offer("command", "merge", "forge_plugin_lora.gone:merge", LORA)
        text = help_text(Catalog([merge, check]))
        heading, summary, _ = command_summary("forge_kit.tools.check:command")
        assert f"{heading}:\n  check         {summary}\n" in text
        assert text.endswith("more:\n  merge          (from forge-plugin-lora 1.2.0)")

    def test_a_group_has_the_sentence_that_one_of_its_commands_states(self) -> None:
        module = "forge_plugin_taps.lens"
        lens = Offer("command", "inside lens", f"{module}.lens_command:command", CORE)
        attention = Offer("command", "inside attention", f"{module}.attention_command:command", CORE)
        assert help_text(Catalog([lens, attention])).endswith("use:\n  inside        Study a model. [attention] [lens]")
        assert help_text(Catalog([lens])).endswith("use:\n  inside        [lens]")

    @pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
    def test_help_is_printed(self, argv: list[str], forge_run: Run) -> None:
        code, out, err = forge_run(*argv)
        assert (code, err) == (0, "")
        assert out.startswith("usage: forge-run JOB.toml")

    def test_every_command_of_the_core_has_a_help_line(self) -> None:
        offers = [o for o in Catalog.installed().offers("command") if o.distribution.name == "forge-run"]
        lines = help_text(Catalog(offers)).splitlines()
        for offer in offers:
            [line] = [line for line in lines if line.startswith(f"  {offer.type} ")]
            assert len(line.split()) > 2, line

    def test_version_tells_the_core_first_and_then_every_distribution(self, forge_run: Run) -> None:
        _, out, _ = forge_run("--version")
        assert out.splitlines()[:3] == ["forge-run 0.1.0", "forge-kit 0.1.0", "forge-plugin-adamw 0.2.0"]

    def test_python_dash_m_works(self, python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
        done = python("-m", "forge_core", "--version")
        assert done.returncode == 0
        assert done.stdout.startswith("forge-run ")


class TestLightness:
    """Told by what was imported, in a process of its own."""

    SCRIPT = "import sys; before = set(sys.modules)\n{}\nprint('IMPORTED', *sorted(set(sys.modules) - before))"

    @pytest.mark.parametrize(
        ("statement", "forbidden"),
        [
            ("import forge_core", {"attrs", "importlib.metadata", *LIGHT}),
            ("from forge_core.cli import main; main(['--help'])", LIGHT),
            ("from forge_core.cli import main; main(['--version'])", LIGHT),
            ("from forge_core.cli import main; main(['plugins'])", LIGHT - {"packaging"}),
            ("from forge_core.cli import main; main(['explain', 'train'])", HEAVY),
            ("from forge_core.cli import main; main(['explain', 'schema'])", HEAVY),
            ("from forge_core import load_job, dump_job, Job, hookimpl, Catalog, __version__", HEAVY),
        ],
    )
    def test_little_is_imported(
        self, statement: str, forbidden: set[str], python: Callable[..., subprocess.CompletedProcess[str]]
    ) -> None:
        done = python("-c", self.SCRIPT.format(statement))
        assert done.returncode == 0, done.stderr
        imported = set(done.stdout.rpartition("IMPORTED")[2].split())
        assert imported & forbidden == set()
        if "schema" not in statement:
            assert {name for name in imported if name.startswith("forge_plugin")} <= AUTHOR

    def test_checking_a_job_imports_no_torch(
        self, python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
    ) -> None:
        (tmp_path / "job.toml").write_text("[train]\nsteps = 1\n[scheduler]\ntype = 'constant'\n")
        check = f"from forge_core.cli import main; main(['check', {str(tmp_path / 'job.toml')!r}])"
        done = python("-c", self.SCRIPT.format(check))
        assert [table for table in ("model", "data", "optimizer") if f": {table}: " not in done.stderr] == []
        assert {"torch", "numpy"} & set(done.stdout.rpartition("IMPORTED")[2].split()) == set()


class TestPublicNames:
    def test_every_public_name_can_be_imported(self) -> None:
        import forge_core

        for name in forge_core.__all__:
            assert getattr(forge_core, name) is not None
        assert set(forge_core.__all__) <= set(dir(forge_core))

    def test_others_are_attribute_errors(self) -> None:
        import forge_core

        with pytest.raises(AttributeError, match="no attribute 'load_jab'"):
            forge_core.load_jab  # noqa: B018
