"""`inducekv-bundle sign`: a signature in a bundle."""

import argparse
from dataclasses import replace
from pathlib import Path

from inducekv_vllm.bundle import read_bundle, read_private_key, sign_digest, write_bundle

from .common import SUCCESS


def run(options: argparse.Namespace) -> int:
    """Sign a bundle in place with an Ed25519 private key; its digest stays the same."""
    key = read_private_key(options.key)
    bundle = read_bundle(options.path)
    signature = sign_digest(bundle.digest, key)
    write_bundle(replace(bundle, signature=signature), options.path)
    print(f"{options.path}: signed by the key {signature.key}, digest {bundle.digest}")
    return SUCCESS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="BUNDLE", type=Path, help="a bundle file")
    parser.add_argument("--key", required=True, metavar="FILE", help="an Ed25519 private key in PEM")
