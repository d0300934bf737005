"""REF: how a user names something. A folder, a packed engine, a digest (prefix), ``alias:NAME``, or a model.

The order is: ``alias:``, then a path that exists, then a digest prefix that the store knows, then a model in
``<home>/models``, then a hub name (``owner/name``). Nothing is guessed from a name's spelling beyond that; a name that
is none of these is refused with the nearest one known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from calib.artifact import MANIFEST, Artifact
from calib.errors import UnknownNameError
from calib.json_text import parse_object
from toolkit.errors import NoRunError, UsageError, unknown_alias
from toolkit.home import Home, expanded
from toolkit.packing import is_packed, opened
from toolkit.store import RunStore

#: Kinds of what runs as it is: a prepared engine is finished when it is first opened on its device.
ENGINES = ("engine", "prepared-engine")


@dataclass(frozen=True, slots=True)
class Ref:
    """What a name stands for. ``kind``: an artifact's kind, ``model``, or ``quantized-checkpoint`` of another tool;
    ``packed``: the file that ``path`` was unpacked from."""

    name: str
    kind: str
    path: Path
    packed: Path | None = None

    def of_kind(self, *kinds: str) -> Ref:
        """Itself, or a UsageError that says what it is and what was wanted."""
        if self.kind not in kinds:
            wanted = " or ".join(_article(kind) for kind in kinds)
            hint = f"Give {wanted}."
            if self.kind in ENGINES and "engine" in kinds:
                hint = f"It becomes an engine where it is first opened: toolkit generate {self.name} --json names it."
            raise UsageError(f"{self.name} is {_article(self.kind)}, not {wanted}", hint)
        return self


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def resolve(name: str, home: Home, store: RunStore, *, offline: bool = False) -> Ref:
    """UnknownNameError, UsageError or NoRunError when the name stands for nothing here."""
    if name.startswith("alias:"):
        return _alias(name, home, store)
    path = expanded(Path(name)) if name.startswith("~") else Path(name)
    if path.exists():
        return _path(name, path, home)
    if found := store.resolve(name):
        kind, place = found
        if not place.is_dir():
            raise NoRunError(f"{kind} {name} was at {place}, which is gone", "Make it again, or give its folder.")
        return Ref(name, kind, place)
    if (home.models / name / "config.json").is_file():
        return _path(name, home.models / name, home)
    if name.count("/") == 1 and not name.startswith((".", "/")):
        from calib.source import resolve_model

        return Ref(name, "model", resolve_model(name, offline=offline))
    known = [folder.name for folder in home.models.glob("*") if not folder.name.startswith(".")]
    known += [f"alias:{alias.alias}" for alias in store.aliases()]
    raise UnknownNameError("folder, digest, alias or model", name, known, "Give a folder that exists, a .gguf file, or "
                           "a hub name like owner/model; `toolkit data prepare` fetches a demo model into home.")


def _alias(name: str, home: Home, store: RunStore) -> Ref:
    from toolkit.unpacking import engine_of_alias

    alias = name.removeprefix("alias:")
    known = store.aliases(alias)
    if not known:
        raise unknown_alias(alias, [found.alias for found in store.aliases()])
    return Ref(name, "engine", engine_of_alias(known[0].target, alias, home.path / "released"))


def _path(name: str, path: Path, home: Home) -> Ref:
    if path.is_file():
        if path.suffix == ".gguf":
            return Ref(name, "model", path)
        if is_packed(path):
            artifact = opened(path, home.path / "unpacked")
            return Ref(name, artifact.kind, artifact.path, path)
        raise UsageError(f"{path} is a file", "Give a folder, a packed engine, or a .gguf model.")
    if (path / MANIFEST).is_file():
        artifact = Artifact.open(path)
        return Ref(name, artifact.kind, artifact.path)
    config = path / "config.json"
    if not config.is_file():
        raise UsageError(f"{path} holds neither {MANIFEST} nor config.json", "Give a model, checkpoint or engine.")
    settings = parse_object(config.read_bytes(), str(config), UsageError, "Copy the model again.")
    quantized = "quantization_config" in settings or (path / "hf_quant_config.json").is_file()
    return Ref(name, "quantized-checkpoint" if quantized else "model", path)
