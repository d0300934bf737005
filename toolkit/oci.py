"""The OCI image layout, as far as a release needs it: three small JSON documents around blobs named by their sha256.

    oci-layout                  {"imageLayoutVersion": "1.0.0"}
    index.json                  the manifests that are here; an annotation names the alias that points at one
    blobs/sha256/<hex>          files, the release's record (the "config") and manifests, all alike

A manifest lists its files as layers with their path in an annotation, so any OCI tool can copy, list and pull a release
without knowing us. Its own sha256 is the release's digest: whoever holds that one string can check everything below.
Source: the OCI image specification 1.1 (image-layout.md, manifest.md, image-index.md).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from calib.artifact import canonical_json, sha256_hex

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
ARTIFACT_TYPE = "application/vnd.llm-quant-toolkit.release.v1+json"
CONFIG_TYPE = "application/vnd.llm-quant-toolkit.release.config.v1+json"
FILE_TYPE = "application/octet-stream"
TITLE = "org.opencontainers.image.title"
REF_NAME = "org.opencontainers.image.ref.name"
CREATED = "org.opencontainers.image.created"
LAYOUT_FILE, LAYOUT = "oci-layout", b'{"imageLayoutVersion":"1.0.0"}'
INDEX_FILE = "index.json"
BLOBS = "blobs/sha256"


class _Document(BaseModel):
    """OCI's own field names; other tools may add fields, which are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    def to_bytes(self) -> bytes:
        return canonical_json(self.model_dump(mode="json", by_alias=True, exclude_none=True))


class Descriptor(_Document):
    media_type: str = Field(alias="mediaType")
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0)
    annotations: dict[str, str] = Field(default_factory=dict)
    artifact_type: str | None = Field(default=None, alias="artifactType")

    @property
    def hex(self) -> str:
        return self.digest.removeprefix("sha256:")

    @property
    def blob(self) -> str:
        """Its name in the target."""
        return f"{BLOBS}/{self.hex}"


class Manifest(_Document):
    schema_version: Literal[2] = Field(default=2, alias="schemaVersion")
    media_type: str = Field(default=MANIFEST_TYPE, alias="mediaType")
    artifact_type: str = Field(default=ARTIFACT_TYPE, alias="artifactType")
    config: Descriptor
    layers: list[Descriptor]
    annotations: dict[str, str] = Field(default_factory=dict)

    def files(self) -> dict[str, Descriptor]:
        """Path -> blob."""
        return {layer.annotations[TITLE]: layer for layer in self.layers}


class Index(_Document):
    """``manifests`` holds each release once without a name, and once for every alias that points at it."""

    schema_version: Literal[2] = Field(default=2, alias="schemaVersion")
    media_type: str = Field(default=INDEX_TYPE, alias="mediaType")
    manifests: list[Descriptor] = Field(default_factory=list)

    def aliases(self) -> dict[str, str]:
        """Alias -> release digest (hex)."""
        return {entry.annotations[REF_NAME]: entry.hex for entry in self.manifests if REF_NAME in entry.annotations}

    def releases(self) -> dict[str, Descriptor]:
        """Digest (hex) -> descriptor, in the order in which they came."""
        found: dict[str, Descriptor] = {}
        for entry in self.manifests:
            found.setdefault(entry.hex, entry)
        return found

    def listing(self, release: Descriptor) -> Index:
        """The same index with ``release`` in it, named by no alias."""
        if release.hex in {entry.hex for entry in self.manifests if REF_NAME not in entry.annotations}:
            return self
        return Index(manifests=[*self.manifests, release.model_copy(update={"annotations": _without_name(release)})])

    def pointing(self, alias: str, release: Descriptor) -> Index:
        """The same index with ``alias`` at ``release``."""
        kept = [entry for entry in self.manifests if entry.annotations.get(REF_NAME) != alias]
        named = release.model_copy(update={"annotations": _without_name(release) | {REF_NAME: alias}})
        return Index(manifests=[*kept, named])


def _without_name(entry: Descriptor) -> dict[str, str]:
    return {key: value for key, value in entry.annotations.items() if key != REF_NAME}


def descriptor(data: bytes, media_type: str, **annotations: Any) -> Descriptor:
    """Of bytes in memory. ``annotations`` by the short words title and created."""
    names = {"title": TITLE, "created": CREATED}
    return Descriptor(mediaType=media_type, digest=f"sha256:{sha256_hex(data)}", size=len(data),
                      annotations={names[key]: value for key, value in annotations.items()})
