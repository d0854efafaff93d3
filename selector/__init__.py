"""The offline side of InduceKV: task data, extraction from a frozen backbone, injection in transformers, selection.

`teach`, `teach_document` and `evaluate` are its Python interface (`selector.api`), and `Server` a running server
(`selector.client`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Accuracy, Callback, Columns, Document, TaskDataWarning, Taught, evaluate, teach, teach_document
    from .backbone.model import Backbone
    from .client import Answer, Server, ServerError
    from .data.examples import Example

__all__ = [
    "Accuracy",
    "Answer",
    "Backbone",
    "Callback",
    "Columns",
    "Document",
    "Example",
    "Server",
    "ServerError",
    "TaskDataWarning",
    "Taught",
    "evaluate",
    "teach",
    "teach_document",
]


def __getattr__(name: str) -> Any:
    """Imported when it is first used: commands that read a bundle do not wait for transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("Answer", "Server", "ServerError"):
        from . import client

        return getattr(client, name)
    from . import api

    return getattr(api, name)
