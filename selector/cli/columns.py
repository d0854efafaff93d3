"""The flags that say which columns of task data hold what."""

import argparse
import re
from typing import Annotated, Final

from inducekv_vllm.errors import ConfigError

from ..data.records import Columns
from ..runtime.settings import Flag, Settings

NAMED: Final = ("prompt", "answer", "image")  # an image is a path, relative to the file
NEXT: Final = re.compile(rf",(?=(?:{'|'.join(NAMED)})=)")  # names of columns may have commas


class ColumnOptions(Settings):
    columns: Annotated[
        str | None, Flag("of a table: prompt=NAME,answer=NAME,image=NAME (default: each is found by its name)", "NAMES")
    ] = None
    task_name: Annotated[
        str | None, Flag("the task of all rows (default: each row's own, else the file's name)", "NAME")
    ] = None

    def of_table(self) -> Columns:
        """Raises ConfigError: the columns are not named as expected."""
        given = dict[str, str]()
        for part in NEXT.split(self.columns) if self.columns is not None else ():
            role, _, name = part.partition("=")
            if role not in NAMED or not name or role in given:
                raise ConfigError(f"--columns must be like prompt=NAME,answer=NAME,image=NAME, found {self.columns!r}")
            given[role] = name
        return Columns(given.get("prompt"), given.get("answer"), given.get("image"), self.task_name)


def columns_of(options: argparse.Namespace) -> Columns:
    """Of a command to which these flags were added."""
    return ColumnOptions(**{n: getattr(options, n) for n in ColumnOptions.model_fields if n in options}).of_table()
