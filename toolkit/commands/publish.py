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
                reason: Annotated[str | None, typer.Option(help="Approve it first, for this reason [default: "
                                                           "`releases approve` has].", show_default=False)] = None,
                override: Annotated[bool, typer.Option("--override", help="Approve without a PASS; needs a --reason "
                                                       "and stays marked.")] = False,
                part: Annotated[list[str] | None, typer.Option(help="engine or checkpoint; may be repeated "
                                                               "[default: engine].", show_default=False)] = None,
                key: Annotated[Path | None, typer.Option(help="Private key (PEM) that signs the statement.",
                                                         show_default=False)] = None) -> None:
        """Publish an engine with its evidence.

        Refuses an engine that is not approved on its newest verdict; an approval needs a PASS for exactly this engine.
        Exit code 1 where its newest verdict is FAIL, 3 where it is INCONCLUSIVE or ANOMALOUS, 2 where it has none or
        is not approved.
        """
        from evals.policy import load_policy
        from toolkit.history import who_am_i
        from toolkit.publishing import Wish, publish_anywhere
        from toolkit.refs import resolve
        from toolkit.store import RunStore

        rules = load_policy(policy) if policy else None
        wish = Wish(alias=alias, who=who_am_i(), reason=reason, policy_sha256=rules.sha256 if rules else None,
                    override=override, parts=tuple(part or ("engine",)), key=key)
        with RunStore(session.home.store) as store, session.watch() as watch:
            engine = resolve(ref, session.home, store, offline=session.offline).of_kind("engine")
            done, place = publish_anywhere(session.home, store, engine.path, to, wish, watch)
        session.show({"release": done.digest, "target": place, "alias": alias, "engine": done.record.engine_digest,
                      "verdict": done.record.word, "files": len(done.manifest.layers), "bytes": done.size_bytes},
                     [done.digest], f"published release {done.digest[:12]} to {place}",
                     f"alias:{alias} now names it")
