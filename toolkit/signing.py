"""An optional signature over a release's statement, made and checked by the ``model-signing`` library.

The statement names every file of the release by sha256 and the audit log's head, so one signature over it covers both.
``provenance.sig`` is the library's own sigstore bundle; the key is an elliptic curve key in a PEM file that stays where
it is. The library is an optional dependency and is imported only when a key is given.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ReleaseError
from toolkit.release import STATEMENT, Release
from toolkit.target import Target

SIGNATURE = "provenance.sig"


def _library() -> tuple[Any, Any]:
    try:
        from model_signing import signing, verifying  # optional dependency
    except ImportError as error:
        raise ReleaseError(f"signing needs a package that is not here: {error.name}",
                           "pip install model-signing pyOpenSSL, or publish without --key.") from error
    return signing, verifying


def _stage(folder: str, written: Mapping[str, bytes]) -> tuple[Path, Path]:
    """(folder that holds only the statement, where its signature lies)."""
    model = Path(folder) / "statement"
    model.mkdir()
    (model / STATEMENT).write_bytes(written[STATEMENT])
    return model, Path(folder) / SIGNATURE


def sign_statement(written: Mapping[str, bytes], key: Path) -> dict[str, bytes]:
    """The signature's file. ``written`` holds the statement; ``key``: an elliptic curve private key, PEM."""
    signing, _ = _library()
    if not key.is_file():
        raise ReleaseError(f"there is no key {key}", "Give a PEM file with an elliptic curve private key.")
    with tempfile.TemporaryDirectory() as folder:
        model, signature = _stage(folder, written)
        try:
            signing.Config().use_elliptic_key_signer(private_key=key).sign(model, signature)
        except (ValueError, TypeError) as error:
            raise ReleaseError(f"{key} cannot sign: {error}",
                               "Give an unencrypted elliptic curve private key in a PEM file.") from error
        return {SIGNATURE: signature.read_bytes()}


def check_signature(target: Target, release: Release, public_key: Path) -> str | None:
    """None when the release's statement was signed by the holder of that key; else what is wrong."""
    _, verifying = _library()
    if not public_key.is_file():
        raise ReleaseError(f"there is no key {public_key}", "Give a PEM file with the public key.")
    files, short = release.manifest.files(), release.digest[:12]
    if SIGNATURE not in files:
        return f"release {short} is not signed"
    content = {name: target.read(files[name].blob) for name in (STATEMENT, SIGNATURE)}
    if None in content.values():
        return f"release {short} has lost its statement or signature"
    with tempfile.TemporaryDirectory() as folder:
        model, signature = _stage(folder, {STATEMENT: content[STATEMENT] or b""})
        signature.write_bytes(content[SIGNATURE] or b"")
        try:
            verifying.Config().use_elliptic_key_verifier(public_key=public_key).verify(model, signature)
        except Exception as error:  # the library raises what its parts raise; every one of them means "no"
            return f"the signature of release {short} does not hold for this key: {' '.join(str(error).split())[:160]}"
    return None
