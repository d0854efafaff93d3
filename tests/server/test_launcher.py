"""`inducekv-serve`: the arguments it passes to vLLM, and what it refuses before anything heavy starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.host.config import ADMIN_KEY_VARIABLE
from server import launcher
from server.demo import BUNDLE, CHECKPOINT
from server.launcher import DEFAULT_HOST, SCHEDULER_CLS, WORKER_CLS, UsageError, main, plugin_list
from tests.bundles import random_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "b.safetensors"
    write_bundle(random_bundle(), path)
    return path


def handed(*argv: str) -> list[str]:
    return launcher.vllm_arguments(*launcher.parser().parse_known_args(argv))


def additional(arguments: list[str]) -> dict:
    assert arguments.count("--additional-config") == 1
    return json.loads(arguments[arguments.index("--additional-config") + 1])


class TestArguments:
    def test_of_a_plain_start(self, bundle: Path) -> None:
        arguments = handed("MODEL", "--memory", f"a={bundle}", f"--memory=b={bundle}", "--port", "1", "-tp", "2")
        ours = ["--host", DEFAULT_HOST, "--worker-cls", WORKER_CLS, "--scheduler-cls", SCHEDULER_CLS]
        assert arguments[:-2] == ["MODEL", *ours, "--port", "1", "-tp", "2"]
        assert additional(arguments) == {"inducekv": {"bundles": {"a": str(bundle), "b": str(bundle)}}}

    def test_the_model_may_stand_behind_our_flags(self, bundle: Path) -> None:
        assert handed("--memory", f"a={bundle}", "MODEL", "--port", "1")[0] == "MODEL"

    def test_settings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each flag and the setting that it becomes; paths are made absolute, as workers may run elsewhere."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "b").mkdir()
        key = public_key(tmp_path / "public.pem")
        given = ["--memory-top-k", "4", "--no-memory-remainder", "--memory-pool-entries", "9"]
        expected: dict[str, object] = {"top_k": 4, "remainder": False, "memory_pool_entries": 9}
        given += ["--memory-state", str(tmp_path / "state"), "--memory-root", str(tmp_path), "--memory-root=b"]
        expected |= {"state": str(tmp_path / "state"), "roots": [str(tmp_path), str(tmp_path / "b")]}
        given += ["--memory-audit-log", str(tmp_path / "log"), "--memory-audit-answers"]
        expected |= {"audit_log": str(tmp_path / "log"), "audit_answers": True}
        given += ["--require-signature", str(key), "--gate-log", str(tmp_path / "gate.jsonl")]
        expected |= {"require_signature": [str(key)], "gate_log": str(tmp_path / "gate.jsonl")}
        monkeypatch.setenv(ADMIN_KEY_VARIABLE, "key")
        assert additional(handed("MODEL", *given)) == {"inducekv": {"bundles": {}, **expected}}

    @pytest.mark.parametrize(("flag", "ours"), [("--memmory", "--memory"), ("--memory_topk", "--memory-top-k")])
    def test_a_flag_that_resembles_ours_is_vllms_to_know(
        self, flag: str, ours: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert handed("MODEL", f"{flag}=4")[-3] == f"{flag}=4"
        warning = f"inducekv-serve: warning: {flag.replace('_', '-')} is left to vLLM; did you mean {ours}?\n"
        assert capsys.readouterr().err == warning
        handed("MODEL", "--port", "1", "--max-model-len", "256")
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("flag", ["--host=0.0.0.0", "--uds=/tmp/s"])
    def test_never_open_to_the_network_unless_asked(self, flag: str) -> None:
        assert DEFAULT_HOST in handed("MODEL")
        assert DEFAULT_HOST not in handed("MODEL", flag)

    def test_a_users_additional_config_is_kept(self, bundle: Path) -> None:
        users = json.dumps({"other": 1, "inducekv": {"bundles": {"b": "b"}, "decision_cache_entries": 7}})
        for flag in (["--additional-config", users], [f"--additional_config={users}"]):
            merged = additional(handed("MODEL", *flag, "--memory", f"a={bundle}"))
            assert merged["other"] == 1
            assert merged["inducekv"] == {"bundles": {"a": str(bundle), "b": "b"}, "decision_cache_entries": 7}

    @pytest.mark.parametrize(("flag", "ours"), [("--worker-cls", WORKER_CLS), ("--scheduler-cls", SCHEDULER_CLS)])
    def test_a_users_class_is_kept(self, flag: str, ours: str) -> None:
        arguments = handed("MODEL", flag, "my.Class")
        assert ours not in arguments
        assert "my.Class" in arguments

    def test_a_config_file(self, tmp_path: Path) -> None:
        file = tmp_path / "serve.yaml"
        file.write_text("model: MODEL\nhost: 127.0.0.2\nadditional_config: {other: 1}\n")
        arguments = handed("--config", str(file), "--memory-top-k", "2")
        ours = ["--worker-cls", WORKER_CLS, "--scheduler-cls", SCHEDULER_CLS]
        assert arguments[:6] == [*ours, "--config", str(file)]
        assert additional(arguments) == {"other": 1, "inducekv": {"bundles": {}, "top_k": 2}}

    def test_the_demo_stands_in_for_a_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Path
    ) -> None:
        arguments = handed("--port", "1")
        assert arguments[0] == str(CHECKPOINT)
        assert additional(arguments) == {"inducekv": {"bundles": {"demo": str(BUNDLE)}}}
        assert additional(handed("--memory", f"a={bundle}")) == {"inducekv": {"bundles": {"a": str(bundle)}}}
        assert additional(handed("MODEL")) == {"inducekv": {"bundles": {}}}

        monkeypatch.setattr(launcher, "BUNDLE", tmp_path / "none.safetensors")
        assert additional(handed("--port", "1")) == {"inducekv": {"bundles": {}}}
        monkeypatch.setattr(launcher, "CHECKPOINT", tmp_path)
        with pytest.raises(UsageError, match="demo model is missing"):
            handed("--port", "1")


def public_key(path: Path) -> Path:
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32).public_key()
    path.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


class TestRefusals:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--memory", "a"], "NAME=PATH, found 'a'"),
            (["--memory", "=p"], "NAME=PATH"),
            (["--memory", "a="], "NAME=PATH"),
            (["--memory", "a=/no/such/file"], "no such file: /no/such/file"),
            (["--memory", "a=BUNDLE", "--memory", "a=BUNDLE"], "'a' twice"),
            (["--memory", "a=DAMAGED"], "a: .*damaged.safetensors"),
            (["--memory-top-k", "0"], "top_k"),
            (["--memory-pool-entries", "0"], "memory_pool_entries: .* greater than or equal to 1 .found 0"),
            (["--additional-config", "{"], "must be JSON"),
            (["--additional-config", "[]"], "must be a JSON object"),
            (["--additional-config", "{}", "--additional-config={}"], "given twice"),
            (["--additional-config"], "needs a value"),
            (["--additional-config.other", "1"], "one JSON object"),
            (["--additional-config", '{"inducekv": 3}'], "must be an object"),
            (["--additional-config", '{"inducekv": {"topk": 3}}'], "topk"),
            (["--additional-config", '{"inducekv": {"bundles": {"a": "b"}}}', "--memory", "a=BUNDLE"], "'a' is given"),
            (["--additional-config", '{"inducekv": {"top_k": 3}}', "--memory-top-k", "2"], "'top_k' is given"),
            (["--config", "/no/such.yaml"], "no/such.yaml"),
            (["--memory-state", "/no/such/state"], "no such folder: /no/such"),
            (["--memory-state", "FOLDER"], "--memory-state: .*a state file is expected, and this is no file"),
            (["--memory-state", "BUNDLE"], "--memory-state: .*file is not a database"),
            (["--memory-audit-log", "/no/such/log"], "no such folder: /no/such"),
            (["--memory-audit-log", "PIPE"], "--memory-audit-log: .*/pipe: .*: not a regular file"),
            (["--gate-log", "/no/such/log"], "--gate-log: /no/such/log: cannot .*: No such file or directory"),
            (["--gate-log", "/tmp"], "--gate-log: /tmp: cannot be used as a gate log: Is a directory"),
            (["--gate-log", "/dev/null"], "--gate-log: /dev/null: .*: not a regular file"),
            (["--memory-audit-answers"], "--memory-audit-answers needs --memory-audit-log FILE"),
            (["--require-signature", "/no/such.pem"], "--require-signature: /no/such.pem: cannot read the key"),
            (["--require-signature", "BUNDLE"], "not a public key in PEM"),
            (["--memory", "a=BUNDLE", "--require-signature", "PUBLIC"], "a: .*: the bundle is not signed"),
            (["--memory-root", "/no/such"], "no such folder: /no/such"),
        ],
    )
    def test_name_the_problem(self, argv: list[str], message: str, bundle: Path) -> None:
        damaged = bundle.with_name("damaged.safetensors")
        damaged.write_bytes(bundle.read_bytes()[:-1])
        named = {"BUNDLE": bundle, "DAMAGED": damaged, "PUBLIC": public_key(bundle.with_name("public.pem"))}
        named |= {"FOLDER": bundle.parent, "PIPE": bundle.with_name("pipe")}
        os.mkfifo(named["PIPE"])
        for name, path in named.items():
            argv = [argument.replace(name, str(path)) for argument in argv]
        with pytest.raises(UsageError, match=message):
            handed("MODEL", *argv)

    def test_a_path_is_no_id_of_the_hub(self) -> None:
        for model in ("./no/such/model", "~/model", "no/such/model", "/no/such/model"):
            with pytest.raises(UsageError, match=f"{model}: no such model folder"):
                handed(model)
        for model in ("owner/model", "s3://bucket/some/model"):
            assert handed(model)[0] == model

    def test_are_one_line_and_status_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            main(["MODEL", "--memory", "a=/no/such/file"])
        assert end.value.code == 2
        assert capsys.readouterr() == ("", "inducekv-serve: error: --memory a: no such file: /no/such/file\n")

    def test_come_before_anything_heavy(self) -> None:
        code = (
            "import sys; from server.launcher import main\n"
            "try: main(['MODEL', '--memory', 'a'])\n"
            "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'vllm' in sys.modules)"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ended.stdout.split() == ["2", "False", "False"]


def test_another_package_of_the_name_is_refused(tmp_path: Path) -> None:
    stranger, ours = tmp_path / "server" / "__init__.py", Path(launcher.__file__).parent
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("")

    def started(*folders: Path) -> tuple[int, str, str]:
        path = os.pathsep.join(map(str, folders))
        code = "from inducekv_serve import main; main(['--print-demo-model'])"
        command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
        ended = subprocess.run(command, env=environment, cwd=tmp_path.parent, capture_output=True, text=True)
        return ended.returncode, ended.stdout, ended.stderr

    status, printed, error = started(tmp_path, ours.parent)
    assert (status, printed) == (2, "")
    assert error.startswith(f"inducekv-serve: error: the package `server` must be {ours}, found {stranger}, ")
    assert error.count("\n") == 1
    assert started(ours.parent, tmp_path) == (0, f"{CHECKPOINT}\n", "")


def test_help_shows_ours_and_points_to_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--memory NAME=PATH" in shown
    assert "see: inducekv-serve --help=all" in shown


class TestAdminKey:
    """It travels in the environment, and never in the arguments, which vLLM writes into its log."""

    def key(self, environment: dict[str, str], *argv: str) -> str | None:
        own, rest = launcher.parser().parse_known_args(["MODEL", *argv])
        assert not any("secret" in argument for argument in launcher.vllm_arguments(own, rest))
        launcher.set_admin_key(environment, own)
        return environment.get(ADMIN_KEY_VARIABLE)

    def test_from_the_flag_or_the_environment(self) -> None:
        assert self.key({}) is None
        assert self.key({}, "--memory-admin-key", "secret") == "secret"
        assert self.key({ADMIN_KEY_VARIABLE: "secret"}, "--memory-root", "/") == "secret"
        assert self.key({ADMIN_KEY_VARIABLE: "secret"}, "--memory-admin-key", "secret") == "secret"

    @pytest.mark.parametrize(
        ("environment", "argv", "message"),
        [
            ({}, ["--memory-root", "/"], "--memory-root needs an admin key: set INDUCEKV_ADMIN_KEY"),
            ({ADMIN_KEY_VARIABLE: "a"}, ["--memory-admin-key", "b"], "two different keys"),
            ({}, ["--memory-admin-key", ""], "printable ASCII"),
            ({ADMIN_KEY_VARIABLE: "a\n"}, [], "printable ASCII"),
            ({ADMIN_KEY_VARIABLE: "schlüssel"}, [], "printable ASCII"),
        ],
    )
    def test_refusals(self, environment: dict[str, str], argv: list[str], message: str) -> None:
        before = dict(environment)
        with pytest.raises(UsageError, match=message):
            self.key(environment, *argv)
        assert environment == before


class TestEnvironment:
    def test_our_plugin_joins_the_users(self) -> None:
        assert plugin_list({"VLLM_PLUGINS": "mine"}) == "mine,inducekv"
        assert plugin_list({"VLLM_PLUGINS": "inducekv,mine"}) == "inducekv,mine"
        assert plugin_list({"VLLM_PLUGINS": ""}) == "inducekv"

    def test_without_a_list_every_plugin_stays(self) -> None:
        names = plugin_list({}).split(",")
        assert {"inducekv", "lora_filesystem_resolver"} <= set(names)  # vLLM brings the second

    @pytest.mark.parametrize(("space", "is_demo", "after"), [(None, True, "1"), (None, False, None), ("8", True, "8")])
    def test_defaults_are_for_the_demo_and_do_not_override(
        self, space: str | None, is_demo: bool, after: str | None
    ) -> None:
        environment = {} if space is None else {"VLLM_CPU_KVCACHE_SPACE": space}
        launcher.set_environment(environment, "inducekv", is_demo=is_demo)
        assert environment["VLLM_PLUGINS"] == "inducekv"
        assert environment.get("VLLM_CPU_KVCACHE_SPACE") == after
