"""`inducekv-serve`: the arguments it passes to vLLM, and what it refuses before anything heavy starts."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
from server import launcher
from server.demo import BUNDLE, CHECKPOINT
from server.launcher import DEFAULT_HOST, SCHEDULER_CLS, WORKER_CLS, UsageError, main, plugin_list
from tests.bundles import random_bundle
from tests.tiny_encoders import save_classifier
from tests.tiny_hybrids import save_granite_hybrid


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "b.safetensors"
    write_bundle(random_bundle(), path)
    return path


def handed(*argv: str, environment: dict[str, str] | None = None) -> Namespace:
    """What vLLM gets."""
    args = launcher.parsed(argv)
    launcher.prepare(args, {} if environment is None else environment)
    return args


def config(*argv: str) -> object:
    return handed(*argv).additional_config["inducekv"]


class TestArguments:
    def test_of_a_plain_start(self, bundle: Path) -> None:
        args = handed("MODEL", "--memory", f"a={bundle}", f"--memory=b={bundle}", "--port", "8001", "-tp", "2")
        assert (args.model_tag, args.host, args.port, args.tensor_parallel_size) == ("MODEL", DEFAULT_HOST, 8001, 2)
        assert (args.worker_cls, args.scheduler_cls) == (WORKER_CLS, SCHEDULER_CLS)
        assert args.additional_config == {"inducekv": {"bundles": {"a": str(bundle), "b": str(bundle)}}}
        assert not [name for name in vars(args) if name.startswith("inducekv")]

    def test_the_model_may_stand_behind_our_flags(self, bundle: Path) -> None:
        assert handed("--memory", f"a={bundle}", "MODEL", "--port", "8001").model_tag == "MODEL"

    def test_the_name_of_a_model_may_stand_before_it_or_alone(self) -> None:
        for given in (["MODEL", "--served-model-name", "a", "b"], ["--served-model-name=a", "--port", "8001", "MODEL"]):
            assert handed(*given).model_tag == "MODEL"
        for flag in ("--served-model-name", "--served_model_name"):
            demo = handed(flag, "mine")
            assert (demo.model_tag, demo.served_model_name) == (str(CHECKPOINT), ["mine"])
        with pytest.raises(UsageError, match="takes all of mine MODEL: write the model before it"):
            handed("--served-model-name", "mine", "MODEL")

    def test_settings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each flag and the setting that it becomes; paths are made absolute, as workers may run elsewhere."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "b").mkdir()
        public_key(tmp_path / "public.pem")
        given = ["--memory-top-k", "4", "--memory-pool-entries", "9"]
        expected: dict[str, object] = {"top_k": 4, "memory_pool_entries": 9}
        given += [
            "--memory-state",
            "state",
            "--memory-root",
            str(tmp_path),
            "--memory-root=b",
            "--memory-audit-answers",
        ]
        expected |= {"state": str(tmp_path / "state"), "roots": [str(tmp_path), str(tmp_path / "b")]}
        given += ["--require-signature", "public.pem", "--memory-admin-key", "key"]
        expected |= {"require_signature": [str(tmp_path / "public.pem")]}
        expected |= {"bundles": {}, "audit_answers": True}
        assert config("MODEL", *given) == expected
        file = tmp_path / "serve.yaml"
        flags = {"memory-top-k": 4, "memory-root": [str(tmp_path)], "memory-admin-key": "key", "port": 8001}
        file.write_text(json.dumps({"model": "MODEL", **flags}))
        args = handed("--config", str(file))
        assert (args.model, args.port) == ("MODEL", 8001)
        assert args.additional_config == {"inducekv": {"bundles": {}, "top_k": 4, "roots": [str(tmp_path)]}}

    @pytest.mark.parametrize("flag", ["--host=0.0.0.0", "--uds=/tmp/s"])
    def test_never_open_to_the_network_unless_asked(self, flag: str) -> None:
        assert handed("MODEL").host == DEFAULT_HOST
        assert handed("MODEL", flag).host != DEFAULT_HOST

    def test_a_users_additional_config_is_kept(self, bundle: Path) -> None:
        users = json.dumps({"other": 1, "inducekv": {"bundles": {"b": str(bundle)}, "keep_versions": 7}})
        args = handed("MODEL", f"--additional_config={users}", "--memory", f"a={bundle}")
        ours = {"bundles": {"a": str(bundle), "b": str(bundle)}, "keep_versions": 7}
        assert args.additional_config == {"other": 1, "inducekv": ours}

    def test_a_shared_bundle_is_a_second_memory(self, bundle: Path) -> None:
        late: dict[str, Any] = {"form": "decoupled", "weighting": "uniform", "activations": {"t": "generation"}}
        write_bundle(random_bundle(**late), bundle)
        expected = {"bundles": {"a": str(bundle)}, "shared": "a"}
        assert config("MODEL", f"--memory=a={bundle}", "--memory-shared=a") == expected

    def test_a_users_class_is_kept(self) -> None:
        args = handed("MODEL", "--worker-cls", "my.Worker", "--scheduler-cls", "my.Scheduler")
        assert (args.worker_cls, args.scheduler_cls) == ("my.Worker", "my.Scheduler")

    def test_the_demo_stands_in_for_a_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        environment: dict[str, str] = {}
        args = handed("--port", "8001", environment=environment)
        assert (args.model_tag, environment) == (str(CHECKPOINT), {"VLLM_CPU_KVCACHE_SPACE": "1"})
        assert args.additional_config == {"inducekv": {"bundles": {"demo": str(BUNDLE)}}}
        assert config("--memory", f"a={BUNDLE}") == {"bundles": {"a": str(BUNDLE)}}
        assert config("MODEL") == {"bundles": {}}
        handed("MODEL", environment=(environment := {}))
        assert not environment
        handed(environment=(environment := {"VLLM_CPU_KVCACHE_SPACE": "8"}))
        assert environment == {"VLLM_CPU_KVCACHE_SPACE": "8"}

        monkeypatch.setattr(launcher, "BUNDLE", tmp_path / "none.safetensors")
        assert config("--port", "8001") == {"bundles": {}}
        monkeypatch.setattr(launcher, "CHECKPOINT", tmp_path)
        with pytest.raises(UsageError, match="demo model is missing"):
            handed("--port", "8001")


def public_key(path: Path) -> Path:
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32).public_key()
    path.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


class TestRefusals:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--memory", "a"], "argument --memory: must be NAME=PATH, found 'a'"),
            (["--memory", "a=/no/such/file"], "argument --memory: a: no such file: /no/such/file"),
            (["--memory", "a=BUNDLE", "--memory", "a=BUNDLE"], "'a' twice"),
            (["--memory", "a=DAMAGED"], "--memory a: .*damaged.safetensors"),
            (["--memory", "prompt=BUNDLE"], "the name 'prompt' is taken: vLLM reads it as a kind of message content"),
            (["--memory", "a@0123456789ab=BUNDLE"], "is taken: requests that end so are pinned to a version"),
            (["--memory", "a b=BUNDLE"], "a bundle's name must be at most 128 letters"),
            (["--memory", "MODEL=BUNDLE"], "the name 'MODEL' is taken by the served model"),
            (["--memory", "a=BUNDLE", "--lora-modules", "a=/lora"], "the name 'a' is taken by a LoRA adapter"),
            (["--memmory=4"], "unrecognized arguments: --memmory=4"),
            (["--memory-top-k", "0"], "top_k: .* greater than or equal to 1 .found 0"),
            (["--memory-pool-entries", "x"], "argument --memory-pool-entries: invalid int value: 'x'"),
            (["--additional-config", "{"], "additional-config must be a JSON object, found"),
            (["--additional-config", '{"inducekv": 3}'], "must be an object"),
            (["--additional-config", '{"inducekv": {"topk": 3}}'], "topk"),
            (["--additional-config", '{"inducekv": {"bundles": {"a": "b"}}}', "--memory", "a=BUNDLE"], "'a' is given"),
            (["--additional-config", '{"inducekv": {"top_k": 3}}', "--memory-top-k", "2"], "'top_k' is given"),
            (["--config", "/no/such.yaml"], "no/such.yaml"),
            (["--config=/no/such.yaml"], "is not read by vLLM: write --config /no/such.yaml"),
            (["--memory-state", "/no/such/state"], "/no/such/state: no such folder: /no/such"),
            (["--memory-state", "FOLDER"], "a state file is expected, and this is no file"),
            (["--memory-state", "BUNDLE"], "file is not a database"),
            (["--memory", "a=BUNDLE", "--memory-shared", "b"], "shared .* found 'b', bundles a, max_memories 2"),
            (["--memory", "a=BUNDLE", "--memory-shared", "a"], "bundle 'a' is merged .*: it cannot be shared"),
            (["--memory-audit-answers"], "audit_answers needs state, the file to record them in"),
            (["--require-signature", "/no/such.pem"], "/no/such.pem: cannot read the key"),
            (["--require-signature", "BUNDLE"], "not a public key in PEM"),
            (["--memory", "a=BUNDLE", "--require-signature", "PUBLIC"], "a: .*: the bundle is not signed"),
            (["--memory-judge", "/no/such"], "/no/such: no such model folder"),
            (["--memory-judge", "FOLDER"], "expected a model folder, found no config.json in it"),
            (["--memory-encoder", "/no/such"], "/no/such: no such model folder"),
            (["--memory-judge", "THREE"], "three: expected a classifier with one output or two, found 3"),
            (["--memory-root", "/no/such"], "argument --memory-root: no such folder: /no/such"),
        ],
    )
    def test_name_the_problem(
        self, argv: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        damaged = bundle.with_name("damaged.safetensors")
        damaged.write_bytes(bundle.read_bytes()[:-1])
        named = {"BUNDLE": bundle, "DAMAGED": damaged, "PUBLIC": public_key(bundle.with_name("public.pem"))}
        named |= {"FOLDER": bundle.parent, "THREE": save_classifier(bundle.with_name("three"), 3)}
        for name, path in named.items():
            argv = [argument.replace(name, str(path)) for argument in argv]
        with pytest.raises(SystemExit) as end:
            main(["MODEL", *argv])
        assert end.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert re.match(rf"inducekv-serve: error: .*{message}", line), line

    @pytest.mark.parametrize("model", [["COPY"], ["--model", "COPY"]])
    def test_a_model_without_a_tokenizer(
        self, tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(CHECKPOINT, copy)
        (copy / "tokenizer.json").unlink()
        with pytest.raises(SystemExit):
            main([each.replace("COPY", str(copy)) for each in model])
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"inducekv-serve: error: {copy}: the model has no tokenizer: expected tokenizer.json")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--memory", "a=BUNDLE"], "--memory a: .* was made for another backbone: architecture"),
            (["-pp", "2"], "InduceKV cannot serve memory with pipeline parallelism"),
            (["--max-model-len", "9999999"], "max_model_len"),
        ],
    )
    def test_what_the_model_in_a_folder_does_not_go_with(
        self, argv: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            main([str(CHECKPOINT), *(each.replace("BUNDLE", str(bundle)) for each in argv)])
        assert end.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert re.match(rf"inducekv-serve: error: .*{message}", line), line

    def test_a_flag_with_which_vllm_computes_a_model_wrongly(self, tmp_path: Path) -> None:
        """A block of states is 128 tokens, or 256 on a CPU with which vLLM keeps them in float32."""
        model = save_granite_hybrid(tmp_path / "model")
        block = "256" if torch.cpu._is_avx512_bf16_supported() else "128"
        reason = rf"--max-num-batched-tokens {block}, or with .* \(vLLM 0.32, not reported"
        with pytest.raises(UnsupportedModel, match=reason):
            handed(str(model), "--enable-prefix-caching", "--max-num-batched-tokens", "512")
        handed(str(model), "--enable-prefix-caching", "--max-num-batched-tokens", block)

    def test_what_vllm_says_of_its_flags_is_one_line(self) -> None:
        with pytest.raises(UsageError) as refused:
            handed(str(CHECKPOINT), "--enable-sleep-mode")
        assert str(refused.value) == "Sleep mode is not supported on current platform."

    def test_on_a_gpu_a_runner_that_nobody_asked_for_is_refused_before_the_engine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = SimpleNamespace(use_v2_model_runner=False)
        monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", lambda args: made)
        monkeypatch.setattr("inducekv_vllm.vllm_seams.requirements.check_engine", lambda config: None)
        monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        handed(str(CHECKPOINT))
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
        with pytest.raises(UnsupportedModel, match="V2 model runner, its default, does not support these flags"):
            handed(str(CHECKPOINT))

    def test_a_path_is_no_id_of_the_hub(self) -> None:
        for model in ("./no/such/model", "~/model", "no/such/model", "/no/such/model"):
            with pytest.raises(UnsupportedModel, match=f"{model}: no such model folder"):
                handed(model)
        for model in ("owner/model", "s3://bucket/some/model"):
            assert handed(model).model_tag == model


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


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_ours_and_points_to_vllms(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([flag])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--memory NAME=PATH" in shown
    assert "inducekv-serve --help=all" in shown


class TestAdminKey:
    """It travels in the environment, and never in the arguments, which vLLM writes into its log."""

    def key(self, environment: dict[str, str], *argv: str) -> str | None:
        args = handed("MODEL", *argv, environment=environment)
        assert "secret" not in repr(args)
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
