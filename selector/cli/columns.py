"""The flags that say which columns of task data hold what."""

from __future__ import annotations

import argparse
from typing import Annotated

from ..data.records import Columns
from ..runtime.settings import Flag, Settings


class ColumnOptions(Settings):
    prompt_column: Annotated[str | None, Flag("of a table: the prompt (default: found by its name)", "NAME")] = None
    answer_column: Annotated[str | None, Flag("of a table: the answer (default: found by its name)", "NAME")] = None
    image_column: Annotated[
        str | None, Flag("of a table: a picture's path, relative to the file (default: image, if there is one)", "NAME")
    ] = None
    task_name: Annotated[
        str | None, Flag("the task of all rows (default: each row's own, else the file's name)", "NAME")
    ] = None

    def columns(self) -> Columns:
        return Columns(self.prompt_column, self.answer_column, self.image_column, self.task_name)


def columns_of(options: argparse.Namespace) -> Columns:
    """Of a command to which these flags were added."""
    return ColumnOptions(**{n: getattr(options, n) for n in ColumnOptions.model_fields if n in options}).columns()
