"""What the subcommands of `inducekv-bundle` have in common: exit statuses, arguments, tables.

A subcommand is a module with `add_arguments` and `run`, which returns the exit status.
"""

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

SUCCESS, DIFFERENT = 0, 1  # an error ends in `bundle.main`
WIDTH: Final = 1000  # of a table at most: for people and pipes alike, never wrapped to the terminal's width


def add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="BUNDLE", type=Path, help="a bundle file; it is not changed")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model folder or Hugging Face id")


def add_base(parser: argparse.ArgumentParser) -> None:
    text = "questions that the model answers well by itself"
    parser.add_argument("--base", type=Path, required=True, metavar="FILE", help=text)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="the bundle file to write, replaced if it exists")


def print_table(table: Table) -> None:
    """Cells are text as it is: names and questions may have brackets."""
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False, width=WIDTH).print(table)
