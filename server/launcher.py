"""`inducekv-serve`: `vllm serve` with flags for memory, which vLLM's own parser reads, and what memory needs."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import MutableMapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import ValidationError

from inducekv_vllm.errors import ConfigError, InduceKVError
from inducekv_vllm.vllm_seams.config import (
    ADMIN_KEY_VARIABLE,
    CONFIG_KEY,
    DEFAULT_HOST_BYTES,
    DEFAULT_POOL_ENTRIES,
    RUN_VARIABLE,
    SCHEDULER_CLS,
    WORKER_CLS,
    InduceKVConfig,
)
from inducekv_vllm.vllm_seams.refused_start import reason_of_refusal

from .check import report
from .demo import BUNDLE, CHECKPOINT

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from inducekv_vllm.bundle import BackboneFingerprint

PROGRAM: Final = "inducekv-serve"
PLUGIN: Final = "inducekv"
GROUP: Final = "InduceKV"
DEFAULT_HOST: Final = "127.0.0.1"
SETTING: Final = "inducekv_"  # our flags are stored under this and the name of their setting
SERVED_NAME: Final = re.compile("^--served.model.name(?==|$)")
DESCRIPTION: Final = f"""vLLM's OpenAI server with memory bundles. Without a model it serves the demo model.
Its other flags are those of vllm serve: {PROGRAM} --help=all
--check says what is installed and whether the server would start, and ends.
--print-demo-model prints the path of the demo model, and ends."""
# The plugin groups that VLLM_PLUGINS filters. If it is unset, vLLM loads every plugin.
PLUGIN_GROUPS: Final = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


class UsageError(InduceKVError):
    """An invalid command line; the message is one line."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `inducekv-serve`; a start that is refused ends with one line and status 2."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        if "--print-demo-model" in given:
            print(demo_model())
            return
        if "--check" in given:
            sys.exit(report(lambda: started([each for each in given if each != "--check"])[1]))
        args, _ = started(given)
        run_vllm(args)
    except InduceKVError as error:
        _refuse(error)


def started(given: Sequence[str]) -> tuple[argparse.Namespace, VllmConfig | None]:
    """What vLLM gets, and what `prepare` returns. Raises as `parsed` and `prepare` do."""
    os.environ["VLLM_PLUGINS"] = plugin_list(os.environ)  # before vLLM is imported
    args = parsed(given)
    return args, prepare(args, os.environ)


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """The arguments of vllm serve and ours. Raises UsageError: vLLM cannot read them. SystemExit: argparse cannot."""
    given = [f"--help={GROUP}" if each in ("-h", "--help") else each for each in given]
    # So spelled, vLLM refuses this flag before a model, even without one. Its parser takes an abbreviation, too.
    given = [SERVED_NAME.sub(lambda flag: flag[0][:-1], each) for each in given]
    try:
        args: argparse.Namespace = parser().parse_args(["serve", *given])
    except Exception as error:  # of the file that --config names, for instance
        raise UsageError(" ".join(str(error).split())) from error
    if args.config is not None:
        raise UsageError(f"--config={args.config} is not read by vLLM: write --config {args.config}")
    return args


def parser() -> FlexibleArgumentParser:
    """vLLM's parser, with our flags in a group of vllm serve."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli: Any = FlexibleArgumentParser(prog=PROGRAM)  # type: ignore[no-untyped-call]
    serve = ServeSubcommand().subparser_init(cli.add_subparsers(dest="subparser"))
    serve.prog, serve.usage = PROGRAM, f"{PROGRAM} [MODEL] [--memory NAME=PATH]... [any flag of vllm serve]"
    add_flags(serve.add_argument_group(GROUP, DESCRIPTION))  # type: ignore[no-untyped-call]
    return cli  # type: ignore[no-any-return]


def add_flags(group: Any) -> None:
    def add(flag: str, setting: str, metavar: str | None, text: str, **how: Any) -> None:
        named = {} if metavar is None else {"metavar": metavar}
        group.add_argument(flag, dest=f"{SETTING}{setting}", default=argparse.SUPPRESS, help=text, **named, **how)

    text = "serve the bundle at PATH as model NAME"
    add("--memory", "bundles", "NAME=PATH", text, type=_named_path, action="append")
    text = "let requests to any other bundle have the bundle NAME, too, as a second memory that all of them share"
    add("--memory-shared", "shared", "NAME", text)
    add("--memory-top-k", "top_k", "K", "retrieve the K nearest entries for a request; all if not given", type=int)
    text = "let bundles in DIR be loaded while the server runs; needs an admin key"
    add("--memory-root", "roots", "DIR", text, type=_folder, action="append")
    text = "look up the bundle NAME as URI/NAME.safetensors when a request asks for it: a folder, or what fsspec reads"
    add("--memory-resolver", "resolver", "URI", text, type=_folder_or_uri)
    text = f"the key of those who may change bundles; better in {ADMIN_KEY_VARIABLE}, where other users do not see it"
    add("--memory-admin-key", "admin_key", "KEY", text)
    text = "keep what is loaded, its versions and a record of all changes in FILE, and serve it again after a restart"
    add("--memory-state", "state", "FILE", text, type=_absolute)
    text = "record in the state file which bundle and entries each answer used, too"
    add("--memory-audit-answers", "audit_answers", None, text, action="store_const", const=True)
    text = "let MODEL, a sequence classifier with one output or two, judge other wordings of facts"
    add("--memory-judge", "judge", "MODEL", text)
    text = "put facts that mean what a request says, by MODEL, a sentence encoder, to the judge, too"
    add("--memory-encoder", "encoder", "MODEL", text)
    text = "say a fact from these log-odds on that a request asks for it in other words; measured if not given"
    add("--memory-judge-threshold", "judge_threshold", "ODDS", text, type=float)
    text = f"room for loaded bundles, in entries of 8 tokens, taken at start; {DEFAULT_POOL_ENTRIES} if not given"
    add("--memory-pool-entries", "memory_pool_entries", "N", text, type=int)
    text = f"bytes of host memory for bundles that have left the pool; {DEFAULT_HOST_BYTES} if not given"
    add("--memory-host-bytes", "memory_host_bytes", "N", text, type=int)
    text = "serve only bundles that are signed by this Ed25519 public key (a PEM file); repeatable: by one of them"
    add("--require-signature", "require_signature", "KEY", text, type=_absolute, action="append")
    text = "serve a page for people at /memory: bundles, facts, questions with and without memory, latest decisions"
    add("--memory-page", "memory_page", None, text, action="store_const", const=True)


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _folder_or_uri(uri: str) -> str:
    return uri if "://" in uri else _folder(uri)


def _folder(path: str) -> str:
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {path}")
    return _absolute(path)


def _named_path(argument: str) -> tuple[str, str]:
    name, _, path = argument.partition("=")
    if not (name and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, found {argument!r}")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{name}: no such file: {path}")
    return name, _absolute(path)


def prepare(args: argparse.Namespace, environment: MutableMapping[str, str]) -> VllmConfig | None:
    """Set what memory needs, and refuse what cannot be served: the engine, which refuses it too, takes minutes.

    Returns vLLM's configuration of a model in a folder.

    Raises:
        InduceKVError: a setting, a name, a bundle, a file, the admin key, the model's folder or a flag of vLLM cannot
            be used.
    """
    own = taken_settings(args)
    set_admin_key(environment, own.pop("admin_key", None), needed="roots" in own)
    choose_demo(args, own)
    if not isinstance(args.additional_config, dict):
        raise UsageError(f"--additional-config must be a JSON object, found {args.additional_config!r}")
    config = merged(args.additional_config.get(CONFIG_KEY, {}), own)
    args.additional_config = {**args.additional_config, CONFIG_KEY: config.model_dump(exclude_unset=True)}
    set_defaults(args, environment)
    check_names(config, args)
    backbone = check_model(args.model_tag or args.model)
    check_files(config, backbone)
    return None if backbone is None else check_flags(args)


def taken_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What our flags have set, by the name of the setting; it is taken out of vLLM's arguments."""
    own = {name.removeprefix(SETTING): value for name, value in vars(args).items() if name.startswith(SETTING)}
    for name in own:
        delattr(args, f"{SETTING}{name}")
    return own


def choose_demo(args: argparse.Namespace, own: dict[str, Any]) -> None:
    """Without a model, the demo model is served, with its bundle unless others are given."""
    from vllm import EngineArgs

    if args.model_tag is None and args.model == EngineArgs.model:
        if len(names := args.served_model_name or []) > 1:
            raise UsageError(f"--served-model-name takes all of {' '.join(names)}: write the model before it")
        args.model_tag = str(demo_model())
        own.setdefault("bundles", [("demo", str(BUNDLE))] if BUNDLE.is_file() else [])


def set_defaults(args: argparse.Namespace, environment: MutableMapping[str, str]) -> None:
    """What memory needs, and other defaults than vLLM's."""
    from vllm.platforms import current_platform

    if args.model_tag == str(CHECKPOINT):
        # The demo model needs a few MiB; by default, vLLM takes a share of the machine's memory on a CPU.
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if current_platform.is_cpu() and args.dtype == "auto":
            args.dtype = "float32"  # vLLM would take bfloat16, and warn of each of the float16 weights
    if args.host is None and args.uds is None:
        args.host = DEFAULT_HOST
    args.worker_cls = WORKER_CLS if args.worker_cls == "auto" else args.worker_cls
    args.scheduler_cls = args.scheduler_cls or SCHEDULER_CLS


def merged(users: Any, own: dict[str, Any]) -> InduceKVConfig:
    """The settings of our flags and the user's additional config, which must not set the same thing."""
    given = dict(own)
    bundles = given.pop("bundles", [])
    if not isinstance(users, dict) or not isinstance(users.get("bundles", {}), dict):
        raise UsageError(f"--additional-config: {CONFIG_KEY!r} must be an object, and its bundles another")
    if twice := [name for number, (name, _) in enumerate(bundles) if name in dict(bundles[:number])]:
        raise UsageError(f"--memory gives the name {twice[0]!r} twice")
    if twice := sorted(users.get("bundles", {}).keys() & dict(bundles)):
        raise UsageError(f"the name {twice[0]!r} is given by --memory and by --additional-config")
    if twice := sorted(users.keys() & given):
        raise UsageError(f"{twice[0]!r} is given by a flag and by --additional-config")
    return InduceKVConfig.parse({**users, **given, "bundles": {**users.get("bundles", {}), **dict(bundles)}})


def set_admin_key(environment: MutableMapping[str, str], given: str | None, *, needed: bool) -> None:
    """Hand the admin key to the server by the environment; vLLM writes its arguments into the log.

    Raises:
        UsageError: it is not a key, is given twice, or is missing where a folder is allowed.
    """
    before = environment.get(ADMIN_KEY_VARIABLE)
    if given is not None and before is not None and given != before:
        raise UsageError(f"--memory-admin-key and {ADMIN_KEY_VARIABLE} give two different keys")
    key = given if given is not None else before
    if key is None:
        if needed:
            raise UsageError(f"--memory-root needs an admin key: set {ADMIN_KEY_VARIABLE}")
        return
    if not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError("the admin key must be printable ASCII characters without spaces around them")
    environment[ADMIN_KEY_VARIABLE] = key


def check_names(config: InduceKVConfig, args: argparse.Namespace) -> None:
    """Raises ConfigError: a name cannot be that of a bundle, or is taken; or there are too many."""
    from .names import refuse_reserved

    served = args.served_model_name or [args.model_tag or args.model]
    adapters = [each.name for each in args.lora_modules or ()]
    for name in config.bundles:
        refuse_reserved(name)
        if name in served:
            raise ConfigError(f"the name {name!r} is taken by the served model")
        if name in adapters:
            raise ConfigError(f"the name {name!r} is taken by a LoRA adapter")


def check_files(config: InduceKVConfig, backbone: BackboneFingerprint | None) -> None:
    """Raises InduceKVError: a bundle, a key, the state, the judge or the encoder cannot be used."""
    from inducekv_vllm.backbone.meaning import SentenceEncoder
    from inducekv_vllm.backbone.pair_classifier import PairClassifier
    from inducekv_vllm.bundle import read_bundle, read_public_key, require_signature
    from inducekv_vllm.frontend.served_bundle import ServedBundle, require_shareable

    from .resolvers import resolver_of
    from .state import check_state_file

    signers = [read_public_key(path) for path in config.require_signature]
    for name, path in config.bundles.items():
        bundle = read_bundle(path, backbone=backbone, name=f"--memory {name}: {path}")
        if signers:
            require_signature(bundle.signature, bundle.digest, signers, f"--memory {name}: {path}")
        if name == config.shared:
            require_shareable(name, ServedBundle.from_bundle(bundle, path))
    if config.resolver is not None:
        resolver_of(config.resolver)
    if config.state is not None:
        check_state_file(Path(config.state))
    if config.judge is not None:
        PairClassifier(config.judge)
    if config.encoder is not None:
        SentenceEncoder(config.encoder)


def check_model(model: str) -> BackboneFingerprint | None:
    """The backbone in a model's folder; None for an id of the hub, which is left to the engine.

    Raises:
        UnsupportedModel: it is of a kind that cannot have a memory.
    """
    from inducekv_vllm.backbone.checkpoints import require_model_folder
    from inducekv_vllm.backbone.fingerprint import backbone_fingerprint

    require_model_folder(model)
    return backbone_fingerprint(model) if Path(model).is_dir() else None


def check_flags(args: argparse.Namespace) -> VllmConfig:
    """vLLM's configuration of the flags, as the engine makes it; the model has a folder.

    Raises:
        UnsupportedModel: memory would be wrong with it.
        UsageError: vLLM refuses the flags itself.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.logger import suppress_logging
    from vllm.platforms import current_platform

    from inducekv_vllm.vllm_seams.requirements import check_engine, check_gpu_runner

    given = argparse.Namespace(**{**vars(args), "model": args.model_tag or args.model})
    try:
        with suppress_logging():
            config: VllmConfig = AsyncEngineArgs.from_cli_args(given).create_engine_config()
    except ValidationError as error:
        raise UsageError(
            "; ".join(" ".join(each["msg"].removeprefix("Value error, ").split()) for each in error.errors())
        ) from error
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
    check_engine(config)
    if not current_platform.is_cpu():
        check_gpu_runner(config)
    return config


def demo_model() -> Path:
    if not (CHECKPOINT / "config.json").is_file():
        raise UsageError(f"the demo model is missing: {CHECKPOINT}; train it, or give a MODEL")
    return CHECKPOINT


def plugin_list(environment: MutableMapping[str, str]) -> str:
    """The value of VLLM_PLUGINS: our plugin, and every plugin that vLLM would load without us."""
    if PLUGIN not in entry_points(group="vllm.endpoint_plugins").names:
        raise UsageError("the distribution inducekv is not installed here, so vLLM cannot find its plugin")
    if "VLLM_PLUGINS" in environment:
        names = [name.strip() for name in environment["VLLM_PLUGINS"].split(",") if name.strip()]
    else:
        names = sorted({point.name for group in PLUGIN_GROUPS for point in entry_points(group=group)})
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def run_vllm(args: argparse.Namespace) -> None:
    """Run `vllm serve` in this process.

    It calls the subcommand directly, because vLLM's `main` needs a distribution named vllm and fails for vllm-cpu.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args

    import server.endpoint  # noqa: F401  vLLM only logs a plugin that cannot be imported, and starts without it
    from inducekv_vllm.vllm_seams.moved import cli_env_setup

    run = tempfile.TemporaryDirectory(prefix="inducekv-run-")
    os.environ[RUN_VARIABLE] = run.name
    cli_env_setup()
    configure_logging_from_args(args)
    command = ServeSubcommand()
    command.validate(args)
    try:
        command.cmd(args)
    except BaseException as error:  # other processes have ended without a word: `refused_start.py`
        if (reason := reason_of_refusal()) is None:
            raise
        raise UsageError(reason) from error


def _refuse(error: InduceKVError) -> NoReturn:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
