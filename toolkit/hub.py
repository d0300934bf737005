"""A release on the Hugging Face Hub: the same files as a repository that people and runtimes can read.

    README.md .eval_results/ engine/ checkpoint/ evidence/ provenance.json   as in the release
    release.json                                                             the release's digest and its OCI manifest

The release is made in a content-addressed target first; the Hub gets a copy of it. The upload is one commit, resumed by
the Hub's own content addressing (what it has is not sent again). Every file is then compared with the commit's listing:
large files by the sha256 that the Hub computed, small ones by their git blob hash. The tag named like the alias moves
last. (The Hub cannot move a tag in one step: it is deleted and made again, so for a moment it names nothing.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from calib.progress import Progress, Report, silent
from toolkit.errors import DamagedReleaseError, ReleaseError
from toolkit.release import Release

PREFIX = "hf://"
RECORD_FILE = "release.json"


class Api(Protocol):
    """What is needed of ``huggingface_hub.HfApi``."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...
    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: str) -> Any: ...
    def list_repo_tree(self, repo_id: str, *, recursive: bool, revision: str) -> Iterable[Any]: ...
    def list_repo_refs(self, repo_id: str) -> Any: ...
    def create_tag(self, repo_id: str, *, tag: str, revision: str) -> Any: ...
    def delete_tag(self, repo_id: str, *, tag: str) -> Any: ...


def hub_api() -> Api:
    """The Hub's client, with whatever login the user has made; no token is read or kept here."""
    from huggingface_hub import HfApi

    return HfApi()


def push(api: Api, url: str, folder: Path, release: Release, alias: str, report: Report = silent) -> str:
    """Upload an unpacked release to ``hf://owner/name``, check the copy, move the tag; returns the commit."""
    repo = url.removeprefix(PREFIX).strip("/")
    if repo.count("/") != 1:
        raise ReleaseError(f"{url} is no repository", "Write it like hf://owner/name.")
    (folder / RECORD_FILE).write_text(json.dumps(
        {"digest": release.digest, "manifest": json.loads(release.manifest.to_bytes())}, indent=1, sort_keys=True))
    report(Progress("upload", 0, 1, "commit", repo))
    api.create_repo(repo, private=True, exist_ok=True)
    commit = str(api.upload_folder(repo_id=repo, folder_path=folder, delete_patterns="*",
                                   commit_message=f"release {release.digest[:12]}").oid)
    report(Progress("upload", 1, 1, "commit", repo))
    _check(api, repo, folder, commit)
    if any(ref.name == alias for ref in api.list_repo_refs(repo).tags):
        api.delete_tag(repo, tag=alias)
    api.create_tag(repo, tag=alias, revision=commit)
    return commit


def _check(api: Api, repo: str, folder: Path, commit: str) -> None:
    listed = {entry.path: entry for entry in api.list_repo_tree(repo, recursive=True, revision=commit)
              if hasattr(entry, "blob_id")}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        entry = listed.get(name)
        if entry is None or not _same(path, entry):
            raise DamagedReleaseError(f"{name} in {repo} is {'missing' if entry is None else 'not what was sent'}",
                                      "Publish again; the alias has not moved.")


def _same(path: Path, entry: Any) -> bool:
    with path.open("rb") as file:
        if getattr(entry, "lfs", None):
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == entry.lfs.sha256)
        git = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        while chunk := file.read(1 << 20):
            git.update(chunk)
        return git.hexdigest() == entry.blob_id
