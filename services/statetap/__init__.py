"""Statetap: taps hidden states out of a running SGLang server and keeps them as checked training data."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    # On first use only: the services import this package too, and have no use for the client (nor, inside SGLang, httpx of our version).
    if name in ("AsyncClient", "Client"):
        from . import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
