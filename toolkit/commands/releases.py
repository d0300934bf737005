"""``releases``: approve an engine, see what a target holds and whether it is as released, move an alias back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.session import Session, verb

Where = Annotated[str, typer.Option("--to", help="Folder or URL that `publish --to` wrote.", show_default=False)]
EngineArgument = Annotated[str, typer.Argument(metavar="REF", show_default=False,
                                               help="Engine: folder, digest prefix or alias:NAME.")]
AtOption = Annotated[str | None, typer.Option(help="As of this date or time (UTC) [default: now].", show_default=False)]
Reason = Annotated[str, typer.Option(help="Why; kept in the log.", show_default=False)]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Approve engines; list, verify, pull and roll back releases.")
    app.add_typer(group, name="releases")
    for add in (_approve, _withdraw, _approvals, _ls, _verify, _log, _rollback, _pull):
        add(group)


def _approve(group: typer.Typer) -> None:
    @verb(group, "approve")
    def approve(session: Session, ref: EngineArgument, reason: Reason,
                policy: Annotated[Path | None, typer.Option(help="Only a verdict under this policy file counts.",
                                                            show_default=False)] = None,
                override: Annotated[bool, typer.Option("--override", help="Approve without a PASS; its releases stay "
                                                       "marked.")] = False) -> None:
        """Let an engine go, on its newest verdict. `publish` then needs no reason; another verdict needs it again.

        Exit code 1 where that verdict is FAIL, 3 where it is INCONCLUSIVE or ANOMALOUS, 2 where there is none.
        """
        from dataclasses import asdict

        from calib.artifact import Artifact
        from evals.policy import load_policy
        from toolkit import approving
        from toolkit.history import who_am_i
        from toolkit.refs import resolve
        from toolkit.store import RunStore

        rules = load_policy(policy) if policy else None
        with RunStore(session.home.store) as store:
            engine = resolve(ref, session.home, store, offline=session.offline).of_kind("engine")
            digest = Artifact.open(engine.path, "engine").digest
            found = approving.approve(store, digest, who_am_i(), reason, override=override,
                                      policy_sha256=rules.sha256 if rules else None)
        session.show(asdict(found), [found.engine], f"{found.who} approved engine {found.engine[:12]} on its verdict "
                     f"{found.word}{' (override)' if override else ''}: {found.reason}")


def _withdraw(group: typer.Typer) -> None:
    @verb(group, "withdraw")
    def withdraw(session: Session, ref: EngineArgument, reason: Reason) -> None:
        """Take an approval back. What was published meanwhile stays: `releases rollback` moves an alias."""
        from calib.artifact import Artifact
        from toolkit import approving
        from toolkit.history import who_am_i
        from toolkit.refs import resolve
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store:
            engine = resolve(ref, session.home, store, offline=session.offline).of_kind("engine")
            digest = Artifact.open(engine.path, "engine").digest
            approving.withdraw(store, digest, who_am_i(), reason)
        session.show({"engine": digest, "approved": False}, [digest], f"engine {digest[:12]} is not approved any more")


def _approvals(group: typer.Typer) -> None:
    @verb(group, "approvals")
    def approvals(session: Session, at: AtOption = None) -> None:
        """Which engines are approved, by whom, when and why; with --at, as of then."""
        from dataclasses import asdict

        from toolkit.approving import standing
        from toolkit.history import parse_moment
        from toolkit.report.status import approvals_table
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store:
            held = standing(store.audit(), parse_moment(at) if at else None)
        session.show({"at": at, "approvals": [asdict(one) for one in held.values()]}, list(held),
                     approvals_table(held) if held else "No engine is approved.")


def _ls(group: typer.Typer) -> None:
    @verb(group, "ls")
    def ls(session: Session, to: Where) -> None:
        """List the releases and aliases of a target."""
        from toolkit.release import list_releases
        from toolkit.report.status import releases_table
        from toolkit.target import existing_target

        target = existing_target(to)
        found = list_releases(target)
        session.show({"target": target.name, "releases": [release.as_dict() for release in found]},
                     [release.digest for release in found],
                     releases_table(found) if found else f"{target.name} holds no releases.")


def _verify(group: typer.Typer) -> None:
    @verb(group, "verify")
    def verify(session: Session, to: Where,
               key: Annotated[Path | None, typer.Option(help="Public key (PEM): every release must be signed by it.",
                                                        show_default=False)] = None) -> None:
        """Re-hash every released file, follow the audit log, check aliases, statements and signatures."""
        from toolkit.errors import DamagedReleaseError
        from toolkit.release import list_releases
        from toolkit.signing import check_signature
        from toolkit.target import existing_target
        from toolkit.verifying import verify_releases

        target = existing_target(to)
        with session.watch() as watch:
            outcome = verify_releases(target, watch)
        faults = list(outcome.faults)
        if key is not None and not faults:
            faults += [fault for release in list_releases(target) if (fault := check_signature(target, release, key))]
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise DamagedReleaseError(f"{faults[0]}{more}", "Publish the engine again into a new target, and find out "
                                      "who changed this one.")
        session.show({"target": target.name, "releases": outcome.releases, "files": outcome.files,
                      "bytes": outcome.bytes, "audit_head": outcome.audit_head, "faults": [], "notes": outcome.notes},
                     [outcome.audit_head],
                     f"{outcome.releases} release{'' if outcome.releases == 1 else 's'}, {outcome.files} files, "
                     f"{outcome.bytes / 1e6:,.1f} MB: all as released. Audit log head {outcome.audit_head[:16]}.",
                     *outcome.notes)


def _log(group: typer.Typer) -> None:
    @verb(group, "log")
    def log(session: Session, to: Where,
            at: Annotated[str | None, typer.Option(help="Show where aliases pointed at this date or time (UTC).",
                                                   show_default=False)] = None) -> None:
        """Who published and moved what, when and why; with --at, what each alias named then."""
        from toolkit.history import as_of, parse_moment
        from toolkit.release import read_audit
        from toolkit.report.status import held_table, log_table
        from toolkit.target import existing_target

        entries = read_audit(existing_target(to))
        if at is None:
            session.show({"entries": [entry.model_dump() for entry in entries]}, [entry.hash for entry in entries],
                         log_table(entries) if entries else "Nothing has been published here.")
            return
        held = as_of(entries, parse_moment(at))
        session.show({"at": at, "aliases": {name: {"digest": move.digest, "since": move.at, "who": move.who,
                                                   "reason": move.reason} for name, move in held.items()}},
                     [f"{name} {move.digest}" for name, move in held.items()],
                     held_table(held) if held else f"No alias pointed anywhere at {at}.")


def _rollback(group: typer.Typer) -> None:
    @verb(group, "rollback")
    def rollback(session: Session, alias: Annotated[str, typer.Argument(help="Alias to move.")], to: Where,
                 reason: Reason,
                 release: Annotated[str | None, typer.Option(help="Digest or prefix [default: what it named before].",
                                                             show_default=False)] = None) -> None:
        """Move an alias back; the release is checked first, and nothing is deleted."""
        from toolkit.history import roll_back, who_am_i
        from toolkit.store import RunStore
        from toolkit.target import existing_target

        target = existing_target(to)
        with RunStore(session.home.store) as store, session.watch() as watch:
            found = roll_back(store, target, alias, who_am_i(), reason, release, watch)
        session.show({"alias": alias, "release": found.digest, "target": target.name}, [found.digest],
                     f"alias:{alias} now names release {found.digest[:12]} ({found.record.name})")


def _pull(group: typer.Typer) -> None:
    @verb(group, "pull")
    def pull(session: Session, alias: Annotated[str, typer.Argument(help="Alias whose release is copied.")], to: Where,
             out: Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist.",
                                               show_default=False)]) -> None:
        """Copy a release out of a target, every byte checked."""
        from toolkit.release import release_of_alias
        from toolkit.target import existing_target
        from toolkit.unpacking import unpack

        target = existing_target(to)
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with session.watch() as watch:
            found = release_of_alias(target, alias)
            place = unpack(target, found, out.absolute(), watch)
        session.show({"release": found.digest, "path": str(place)}, [str(place)], f"wrote {place}")
