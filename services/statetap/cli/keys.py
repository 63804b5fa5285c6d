"""``statetap keys``: make, list and revoke the API keys of a coordinator, in its keys file.

Invariant: a key is printed once, when it is made, and is nowhere else; the file holds hashes. A coordinator that runs reads the file again
by itself.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..coordinator.keyfile import Scope, add_key, read_keys, revoke_key

keys_app = typer.Typer(no_args_is_help=True, help="API keys: make, list and revoke them.")

File = Annotated[Path, typer.Option("--file", envvar="STATETAP_KEYS_FILE", help="The coordinator's keys file.")]
Name = Annotated[str, typer.Argument(help="Whose key it is: 1 to 64 of A-Z a-z 0-9 . _ -")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ScopeName(StrEnum):
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


@keys_app.command("add")
def add(
    name: Name,
    file: File,
    scope: Annotated[ScopeName, typer.Option("--scope", help="What it may do; each includes the ones before it.")] = ScopeName.WRITE,
    as_json: Json = False,
) -> None:
    """Make a key and print it once; the file, made where there is none, gets its hash."""
    key = add_key(file, name, Scope[scope.value.upper()])
    print(json.dumps({"name": name, "scope": scope.value, "key": key}) if as_json else key, flush=True)
    print(f"{name} may {scope.value}; keep the key now, it is shown only this once (STATETAP_API_KEY)", file=sys.stderr)


@keys_app.command("list")
def list_keys(file: File, as_json: Json = False) -> None:
    """List names and scopes."""
    for key in read_keys(file):
        print(json.dumps({"name": key.name, "scope": key.scope.label}) if as_json else f"{key.name}  {key.scope.label}", flush=True)


@keys_app.command("revoke")
def revoke(name: Name, file: File, as_json: Json = False) -> None:
    """Take a key back; a running coordinator refuses it within a second or so, and the page's sessions that were opened with it."""
    revoke_key(file, name)
    print(json.dumps({"name": name, "revoked": True}) if as_json else f"{name} is revoked", flush=True)
