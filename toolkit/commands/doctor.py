"""``doctor``: what this machine can do, and what is missing for the rest."""

from __future__ import annotations

import typer

from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "doctor")
    def doctor(session: Session) -> None:
        """Say what this machine can do, what is missing."""
        from toolkit.health import check
        from toolkit.report.status import health_table

        facts = check(session.home)
        session.show({"checks": [fact.as_dict() for fact in facts]},
                     [fact.name for fact in facts if fact.state == "missing"], health_table(facts))
