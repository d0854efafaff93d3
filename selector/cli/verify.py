"""`inducekv-bundle verify`: that a bundle is whole, fits a model, and is signed by somebody."""

import argparse

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.bundle import read_bundle, read_public_key, require_signature

from .common import SUCCESS, add_bundle


def run(options: argparse.Namespace) -> int:
    """Check a bundle's structure, values and digest; with --model that it was made for that model, with --public-key
    that one of these keys has signed it.
    """
    path = str(options.path)
    bundle = read_bundle(path)
    if options.public_key:
        require_signature(bundle.signature, bundle.digest, [read_public_key(p) for p in options.public_key], path)
    if options.model:
        bundle.require_backbone(backbone_fingerprint(options.model), path)
    print(f"{path}: good, {bundle.num_entries} entries, digest {bundle.digest}")
    return SUCCESS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    parser.add_argument("--model", help="model folder or Hugging Face id the bundle must fit")
    text = "an Ed25519 public key in PEM that must have signed the bundle; repeatable: one of them"
    parser.add_argument("--public-key", action="append", metavar="FILE", help=text)
