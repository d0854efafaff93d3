"""`inducekv-bundle audit`: the audit chain of a server."""

import argparse

from inducekv_vllm.files import audit_chain

from .common import SUCCESS


def run(options: argparse.Namespace) -> int:
    """Check the audit chain of a server from its first record to its last, and print its head; or print its records.

    Exit status 2: a record is broken.
    """
    if options.show:
        for _, record in audit_chain.read(options.path):
            print(record)
        return SUCCESS
    records, head = audit_chain.verify(options.path, options.head)
    print(f"{options.path}: {records} records, head {head}")
    return SUCCESS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="what the server was given as --memory-state")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--head", metavar="SHA256", help="the head of an earlier check, which must be in the chain")
    one.add_argument("--show", action="store_true", help="print the records, a JSON object a line, and check nothing")
