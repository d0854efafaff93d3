"""Who may change bundles and from which folders, and whose a request is.

Every change needs the admin key. Without one, or without an allowed folder, bundles are only loaded at start.
"""

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from inducekv_vllm.errors import BundleError, InduceKVError
from inducekv_vllm.files.regular import open_regular
from inducekv_vllm.frontend.owner import OWNER
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE

KEY_DIGITS: Final = 16  # of the digest of a key, in the audit chain


class ChangeRefused(InduceKVError):
    """A change that this server does not take from whoever asks for it."""

    def __init__(self, reason: str, status: HTTPStatus) -> None:
        super().__init__(reason)
        self.status = status


class Access:
    """The folders that bundles may be loaded from while the server runs, and its key."""

    def __init__(self, roots: Sequence[str] = (), admin_key: str | None = None) -> None:
        self._roots = tuple(os.path.realpath(root) for root in roots)
        self._admin = None if not admin_key else key_digest(admin_key)

    @property
    def key_name(self) -> str | None:
        """How the audit chain names the admin's key: the beginning of its digest."""
        return None if self._admin is None else self._admin.hex()[:KEY_DIGITS]

    def is_admin(self, key: str | None) -> bool:
        return self._admin is not None and key is not None and secrets.compare_digest(key_digest(key), self._admin)

    def require_admin(self, key: str | None) -> None:
        """Raises ChangeRefused: with 403 if the server takes no changes, with 401 for a wrong or missing key."""
        if self._admin is None:
            raise ChangeRefused(
                "bundles cannot be changed while this server runs: it was started without an admin key "
                f"({ADMIN_KEY_VARIABLE} or --memory-admin-key)",
                HTTPStatus.FORBIDDEN,
            )
        if not self.is_admin(key):
            found = "another key" if key else "none"
            raise ChangeRefused(
                f"changes of bundles need the admin key in the header {ADMIN_HEADER}, found {found}",
                HTTPStatus.UNAUTHORIZED,
            )

    def inside(self, path: str, what: str) -> str:
        """The real path of what must lie beneath an allowed folder; a relative `path` is beneath the first one.

        Raises:
            ChangeRefused: no folder is allowed.
            BundleError: it lies elsewhere. The message is the same whether anything is there or not.
        """
        if not self._roots:
            raise ChangeRefused(
                "bundles cannot be loaded while this server runs: no folder is allowed (--memory-root)",
                HTTPStatus.FORBIDDEN,
            )
        try:
            real = os.path.realpath(os.path.join(self._roots[0], path))
        except (OSError, ValueError) as error:
            raise BundleError(f"{what}: {path!r:.300} is not the name of a file") from error
        if not any(Path(real).is_relative_to(root) for root in self._roots):
            raise BundleError(f"{what}: {path!r:.300} is not in a folder that this server loads from (--memory-root)")
        return real


@contextlib.contextmanager
def stable_path(real: str, what: str) -> Iterator[str]:
    """A name of the file at `real` that leads to this file until the end of the context, whatever becomes of `real`.

    No symbolic link is followed: `real` is what `Access.inside` has returned, and a link in it was put there since.

    Raises:
        BundleError: no regular file is there.
    """
    try:
        descriptor = _open_without_links(real)
    except FileNotFoundError as error:
        raise BundleError(f"{what}: {real}: no such file") from error
    except OSError as error:
        reason = "it became a symbolic link while it was opened" if error.errno == errno.ELOOP else error.strerror
        raise BundleError(f"{what}: {real!r:.300}: {reason}") from error
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _open_without_links(real: str) -> int:
    """Open an absolute path for reading, one folder in the other. Raises OSError."""
    *folders, name = Path(real).parts[1:] or (".",)
    folder = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        return open_regular(name, os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def key_digest(key: str) -> bytes:
    """Of a key, SHA-256: keys are compared and told apart by it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def who(host: str | None) -> str:
    """How a log line names who asked for a change."""
    return f"admin at {host or 'a local socket'}"


class OwnerMiddleware:
    """Sets `OWNER` for each request: a digest of the key that it came with."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            keys = [value for name, value in scope["headers"] if name == b"authorization"]
            OWNER.set(hashlib.sha256(keys[0]).hexdigest() if keys else "")
        await self._app(scope, receive, send)
