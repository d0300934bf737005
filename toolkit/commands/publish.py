"""``publish``: an engine with its evidence to a folder, an object store or the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "publish")
    def publish(session: Session,
                ref: Annotated[str, typer.Argument(metavar="REF", help="Engine: folder, digest prefix or alias:NAME.")],
                to: Annotated[str, typer.Option("--to", help="Folder, URL such as s3://bucket/path, or "
                                                "hf://owner/name.", show_default=False)],
                alias: Annotated[str, typer.Option(help="Name that will point at this release.",
                                                   show_default=False)],
                policy: Annotated[Path | None, typer.Option(help="Only a verdict under this policy file counts.",
                                                            show_default=False)] = None,
                reason: Annotated[str, typer.Option(help="Why it may go; kept in card and log.")] = "passed its gate",
                override: Annotated[bool, typer.Option("--override", help="Release without a PASS; needs a --reason "
                                                       "and stays marked.")] = False,
                part: Annotated[list[str] | None, typer.Option(help="engine or checkpoint; may be repeated "
                                                               "[default: engine].", show_default=False)] = None,
                key: Annotated[Path | None, typer.Option(help="Private key (PEM) that signs the statement.",
                                                         show_default=False)] = None) -> None:
        """Publish an engine with its evidence.

        Refuses without a PASS verdict for exactly this engine.
        """
        from evals.policy import load_policy
        from toolkit.errors import UsageError
        from toolkit.history import who_am_i
        from toolkit.publishing import Wish, publish_anywhere
        from toolkit.refs import resolve
        from toolkit.store import RunStore

        if override and reason == "passed its gate":
            raise UsageError("--override needs a --reason", "Say why it may go without a PASS.")
        rules = load_policy(policy) if policy else None
        wish = Wish(alias=alias, reason=reason, who=who_am_i(), policy_sha256=rules.sha256 if rules else None,
                    override=reason if override else None, parts=tuple(part or ("engine",)), key=key)
        with RunStore(session.home.store) as store, session.watch() as watch:
            engine = resolve(ref, session.home, store, offline=session.offline).of_kind("engine")
            done, place = publish_anywhere(session.home, store, engine.path, to, wish, watch)
        session.show({"release": done.digest, "target": place, "alias": alias, "engine": done.record.engine_digest,
                      "verdict": done.record.word, "files": len(done.manifest.layers), "bytes": done.size_bytes},
                     [done.digest], f"published release {done.digest[:12]} to {place}",
                     f"alias:{alias} now names it")
