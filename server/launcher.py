"""`inducekv-serve`: `vllm serve` with the flags that memory needs, and `--memory NAME=PATH`.

It prepares the arguments and then runs vLLM's own command in this process.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inducekv_vllm.errors import BundleError, ConfigError, UnsupportedModel
from inducekv_vllm.host.config import (
    ADMIN_KEY_VARIABLE,
    CONFIG_KEY,
    DEFAULT_POOL_ENTRIES,
    RUN_VARIABLE,
    SCHEDULER_CLS,
    WORKER_CLS,
    InduceKVConfig,
)

from .demo import BUNDLE, CHECKPOINT

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PLUGIN = "inducekv"
SIMILAR = 0.8  # no flag of vLLM 0.32 is as similar to one of ours
DEFAULT_HOST = "127.0.0.1"
# The plugin groups that VLLM_PLUGINS filters. If it is unset, vLLM loads every plugin.
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


class UsageError(ValueError):
    """An invalid command line; the message is one line."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `inducekv-serve`; exits with status 2 on an invalid command line."""
    cli, given = parser(), sys.argv[1:] if argv is None else list(argv)
    if "--help=all" in given:
        run_vllm(["--help=all"])
        return
    own, rest = cli.parse_known_args(given)
    try:
        if own.print_demo_model:
            print(demo_model())
            return
        arguments = vllm_arguments(own, rest)
        set_admin_key(os.environ, own)
        plugins = plugin_list(os.environ)
    except UsageError as error:
        cli.exit(2, f"{cli.prog}: error: {error}\n")
    set_environment(os.environ, plugins, is_demo=arguments[0] == str(CHECKPOINT))
    run_vllm(arguments)


def parser() -> argparse.ArgumentParser:
    """Our own flags; all others belong to vLLM."""
    cli = argparse.ArgumentParser(
        prog="inducekv-serve",
        usage="inducekv-serve [MODEL] [--memory NAME=PATH]... [--memory-pool-entries N] [any flag of vllm serve]",
        description="vLLM's OpenAI server with memory bundles. Without MODEL it serves the demo model.",
        epilog="For all flags of vllm serve see: inducekv-serve --help=all",
        allow_abbrev=False,
    )
    cli.add_argument(
        "--memory", metavar="NAME=PATH", action="append", default=[], help="serve the bundle at PATH as model NAME"
    )
    cli.add_argument(
        "--memory-top-k", metavar="K", type=int, help="retrieve the K nearest entries for a request (default: all)"
    )
    cli.add_argument(
        "--no-memory-remainder",
        action="store_true",
        help="with --memory-top-k and square-root weighting, leave what is not retrieved out of the softmax",
    )
    cli.add_argument(
        "--memory-root",
        metavar="DIR",
        action="append",
        default=[],
        help="let bundles in DIR be loaded while the server runs; needs an admin key",
    )
    cli.add_argument(
        "--memory-admin-key",
        metavar="KEY",
        help=f"the key of those who may change bundles; better set in {ADMIN_KEY_VARIABLE}, where other users of the "
        "machine do not see it",
    )
    cli.add_argument(
        "--memory-state",
        metavar="FILE",
        help="keep what is loaded, with its versions, in FILE, and serve it again after a restart",
    )
    cli.add_argument(
        "--memory-pool-entries",
        metavar="N",
        type=int,
        help=f"room for loaded bundles, in entries of 8 tokens; it is taken at start (default: {DEFAULT_POOL_ENTRIES})",
    )
    cli.add_argument(
        "--require-signature",
        metavar="KEY",
        action="append",
        default=[],
        help="serve only bundles that are signed by this Ed25519 public key (a PEM file); repeatable: by one of them",
    )
    cli.add_argument(
        "--memory-audit-log", metavar="FILE", help="append every change of the bundles to FILE, each record chained"
    )
    cli.add_argument(
        "--memory-audit-answers",
        action="store_true",
        help="with --memory-audit-log, record which bundle and entries each answer used too",
    )
    cli.add_argument(
        "--gate-log",
        metavar="FILE",
        help="append what the relevance gate sees of every request, and its decision, to FILE: numbers, no text",
    )
    cli.add_argument("--print-demo-model", action="store_true", help="print the path of the demo model, and end")
    return cli


def vllm_arguments(own: argparse.Namespace, rest: list[str]) -> list[str]:
    """Build the arguments of `vllm serve`: the model, the user's arguments, and those that memory needs.

    Raises:
        UsageError: a memory is not NAME=PATH or does not exist, an allowed folder does not exist, a name is duplicate,
            a setting is out of range, the model's folder is of a kind that cannot have a memory,
            or the demo model is missing.
    """
    from_file = config_file(rest)
    additional_flag, rest = take(rest, "--additional-config")
    settings = settings_of(own)
    warn_of_misspelt(rest)
    if rest and not rest[0].startswith("-"):
        model, rest = rest[0], rest[1:]
    elif "model" in from_file or has_flag(rest, "--model"):
        model = None
    else:
        model = str(demo_model())
        if not settings["bundles"] and BUNDLE.is_file():
            settings["bundles"] = {"demo": str(BUNDLE)}

    additional = merged(additional_config(additional_flag, from_file), settings)
    check_model(model or take(rest, "--model")[0] or str(from_file.get("model")))
    arguments = [] if model is None else [model]
    if not (has_flag(rest, "--host") or has_flag(rest, "--uds") or from_file.keys() & {"host", "uds"}):
        arguments += ["--host", DEFAULT_HOST]
    for flag, default in (("worker-cls", WORKER_CLS), ("scheduler-cls", SCHEDULER_CLS)):
        if not (has_flag(rest, f"--{flag}") or flag in from_file):
            arguments += [f"--{flag}", default]
    return [*arguments, *rest, "--additional-config", json.dumps(additional)]


def settings_of(own: argparse.Namespace) -> dict[str, Any]:
    """Convert our flags to the settings of `InduceKVConfig`; always includes the bundles."""
    signers = public_keys(own.require_signature)
    bundles: dict[str, str] = {}
    for argument in own.memory:
        name, _, path = argument.partition("=")
        if not (name and path):
            raise UsageError(f"--memory must be NAME=PATH, found {argument!r}")
        if name in bundles:
            raise UsageError(f"--memory gives the name {name!r} twice")
        if not Path(path).is_file():
            raise UsageError(f"--memory {name}: no such file: {path}")
        check_bundle(name, path, signers)
        bundles[name] = str(Path(path).absolute())
    settings: dict[str, Any] = {"bundles": bundles}
    if own.memory_top_k is not None:
        settings["top_k"] = own.memory_top_k
    if own.memory_pool_entries is not None:
        settings["memory_pool_entries"] = own.memory_pool_entries
    if own.no_memory_remainder:
        settings["remainder"] = False
    if own.memory_root:
        for root in own.memory_root:
            if not Path(root).is_dir():
                raise UsageError(f"--memory-root: no such folder: {root}")
        settings["roots"] = [str(Path(root).absolute()) for root in own.memory_root]
    if own.memory_state:
        if not Path(own.memory_state).absolute().parent.is_dir():
            raise UsageError(f"--memory-state: no such folder: {Path(own.memory_state).absolute().parent}")
        settings["state"] = str(Path(own.memory_state).absolute())
        from .state import check_state_file

        with refused_for("--memory-state"):
            check_state_file(Path(settings["state"]))
    if own.require_signature:
        settings["require_signature"] = [str(Path(key).absolute()) for key in own.require_signature]
    if own.memory_audit_log:
        if not Path(own.memory_audit_log).absolute().parent.is_dir():
            raise UsageError(f"--memory-audit-log: no such folder: {Path(own.memory_audit_log).absolute().parent}")
        settings["audit_log"] = str(Path(own.memory_audit_log).absolute())
        from inducekv_vllm.files.audit_chain import AuditWriter

        with refused_for("--memory-audit-log"):
            AuditWriter(settings["audit_log"]).close()
    if own.memory_audit_answers:
        if not own.memory_audit_log:
            raise UsageError("--memory-audit-answers needs --memory-audit-log FILE")
        settings["audit_answers"] = True
    if own.gate_log:
        settings["gate_log"] = str(Path(own.gate_log).absolute())
        from inducekv_vllm.engine.gate_log import open_log

        with refused_for("--gate-log"):
            os.close(open_log(settings["gate_log"]))
    return settings


def set_admin_key(environment: MutableMapping[str, str], own: argparse.Namespace) -> None:
    """Hand the admin key to the server by the environment; vLLM writes its arguments into the log.

    Raises:
        UsageError: it is not a key, is given twice, or is missing where a folder is allowed.
    """
    given, before = own.memory_admin_key, environment.get(ADMIN_KEY_VARIABLE)
    if given is not None and before is not None and given != before:
        raise UsageError(f"--memory-admin-key and {ADMIN_KEY_VARIABLE} give two different keys")
    key = given if given is not None else before
    if key is None:
        if own.memory_root:
            raise UsageError(f"--memory-root needs an admin key: set {ADMIN_KEY_VARIABLE}")
        return
    if not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError("the admin key must be printable ASCII characters without spaces around them")
    environment[ADMIN_KEY_VARIABLE] = key


def public_keys(paths: Sequence[str]) -> list[Ed25519PublicKey]:
    """Raises UsageError: one of the files is not an Ed25519 public key."""
    if not paths:
        return []
    from inducekv_vllm.bundle import read_public_key

    with refused_for("--require-signature"):
        return [read_public_key(path) for path in paths]


def check_bundle(name: str, path: str, signers: Sequence[Ed25519PublicKey]) -> None:
    """Read the bundle before the engine starts, so that a damaged file fails in seconds instead of minutes."""
    from inducekv_vllm.bundle import read_bundle, require_signature

    with refused_for(f"--memory {name}"):
        bundle = read_bundle(path)
        if signers:
            require_signature(bundle.signature, bundle.digest, signers, path)


@contextmanager
def refused_for(flag: str) -> Iterator[None]:
    """What is refused inside is a UsageError of the flag: the engine, which refuses it too, takes minutes to start."""
    try:
        yield
    except (BundleError, ConfigError) as error:
        raise UsageError(f"{flag}: {error}") from error


def check_model(model: str) -> None:
    """Look at a model's folder before the engine starts, which would fail later and with vLLM's reasons first.

    An id of the hub is left to the engine, which fetches it.
    """
    from inducekv_vllm.backbone.checkpoints import require_model_folder
    from inducekv_vllm.backbone.fingerprint import backbone_fingerprint

    try:
        require_model_folder(model)
        if Path(model).is_dir():
            backbone_fingerprint(model)
    except UnsupportedModel as error:
        raise UsageError(str(error)) from error


def merged(additional: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Merge our settings into the user's additional config; they must not set the same thing."""
    config = additional.get(CONFIG_KEY, {})
    if not isinstance(config, dict) or not isinstance(config.get("bundles", {}), dict):
        raise UsageError(f"--additional-config: {CONFIG_KEY!r} must be an object, and its bundles another")
    bundles = config.get("bundles", {})
    if duplicates := sorted(bundles.keys() & settings["bundles"].keys()):
        raise UsageError(f"the name {duplicates[0]!r} is given by --memory and by --additional-config")
    if duplicates := sorted(config.keys() & settings.keys() - {"bundles"}):
        raise UsageError(f"{duplicates[0]!r} is given by a flag and by --additional-config")
    config = {**config, **settings, "bundles": {**bundles, **settings["bundles"]}}
    try:
        InduceKVConfig.parse(config)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return {**additional, CONFIG_KEY: config}


def additional_config(flag: str | None, from_file: dict[str, Any]) -> dict[str, Any]:
    """The user's additional config for vLLM; as in vLLM, the flag overrides the file."""
    try:
        value = from_file.get("additional-config", {}) if flag is None else json.loads(flag)
    except json.JSONDecodeError as error:
        raise UsageError(f"--additional-config must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"--additional-config must be a JSON object, found {value!r}")
    return value


def config_file(rest: list[str]) -> dict[str, Any]:
    """Read the YAML file of vLLM's --config; keys are names of flags without the leading dashes."""
    path, _ = take(rest, "--config")
    if path is None:
        return {}
    import yaml  # type: ignore[import-untyped]

    try:
        settings = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path}: expected a mapping of settings")
    return {str(name).replace("_", "-"): value for name, value in settings.items()}


def take(rest: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Split off a flag that may occur once: return its value and the other arguments."""
    value, left, position = None, [], 0
    while position < len(rest):
        name, separator, inline = rest[position].partition("=")
        name = normal(name)
        position += 1
        if name.startswith(f"{flag}."):
            raise UsageError(f"give {flag} as one JSON object, not as {name}")
        if name != flag:
            left.append(rest[position - 1])
            continue
        if value is not None:
            raise UsageError(f"{flag} is given twice")
        if not separator and position == len(rest):
            raise UsageError(f"{flag} needs a value")
        value = inline if separator else rest[position]
        position += not separator
    return value, left


def warn_of_misspelt(rest: list[str]) -> None:
    """vLLM refuses what it does not know, without knowing ours. A later vLLM or another plugin may know it."""
    own = [flag for action in parser()._actions for flag in action.option_strings if flag.startswith("--")]
    for argument in rest:
        flag = normal(argument.partition("=")[0])
        if flag.startswith("--") and (near := difflib.get_close_matches(flag, own, 1, SIMILAR)):
            print(f"inducekv-serve: warning: {flag} is left to vLLM; did you mean {near[0]}?", file=sys.stderr)


def has_flag(rest: list[str], flag: str) -> bool:
    return any(normal(argument.partition("=")[0]) == flag for argument in rest)


def normal(name: str) -> str:
    """vLLM accepts underscores instead of dashes in the names of flags."""
    return name.replace("_", "-") if name.startswith("--") else name


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


def set_environment(environment: MutableMapping[str, str], plugins: str, *, is_demo: bool) -> None:
    environment["VLLM_PLUGINS"] = plugins
    if is_demo:
        # The demo model needs a few MiB; by default, vLLM takes a share of the machine's memory on a CPU.
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def run_vllm(arguments: list[str]) -> None:
    """Run `vllm serve` in this process.

    It calls the subcommand directly, because vLLM's `main` needs a distribution named vllm and fails for vllm-cpu.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import server.endpoint  # noqa: F401  vLLM only logs a plugin that cannot be imported, and starts without it

    run = tempfile.TemporaryDirectory(prefix="inducekv-run-")
    os.environ[RUN_VARIABLE] = run.name
    sys.argv = ["vllm", "serve", *arguments]
    cli_env_setup()  # type: ignore[no-untyped-call]
    command = ServeSubcommand()
    vllm_parser = FlexibleArgumentParser(prog="vllm")  # type: ignore[no-untyped-call]
    command.subparser_init(vllm_parser.add_subparsers(dest="subparser"))
    parsed = vllm_parser.parse_args(sys.argv[1:])
    configure_logging_from_args(parsed)
    command.validate(parsed)
    command.cmd(parsed)


if __name__ == "__main__":
    main()
