"""`tidegate rules`: check the rules of the rate limit service, and show which of them applies."""

from __future__ import annotations

from pathlib import Path

import click

from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.server.rls.explain import Explanation, explain
from tidegate.server.rls.rules_file import RulesError, load_rules

__all__ = ["rules"]


@click.group()
def rules() -> None:
    """Check and explain rules files of Envoy's rate limit service (the layout of envoyproxy/ratelimit)."""


@rules.command()
@click.argument("place", metavar="FILE", type=click.Path(path_type=Path))
@json_option
def check(place: Path, as_json: bool) -> ExitCode:
    """Check FILE, or every .yaml file of a directory; exits 2 and lists every error if there are any."""
    try:
        loaded = load_rules(place)
    except RulesError as error:
        faults = [fault._asdict() for fault in error.faults]
        lines = [f"fault: {fault}" for fault in error.faults]
        print_result(as_json, {"ok": False, "faults": faults, "domains": {}}, "\n".join(lines))
        return ExitCode.ERROR
    domains = dict.fromkeys(loaded.domains, 0)
    for domain, _ in loaded.rules():
        domains[domain] += 1
    text = "\n".join([*(f"{domain}: {count} rules" for domain, count in domains.items()), "ok"])
    print_result(as_json, {"ok": True, "faults": [], "domains": domains}, text)
    return ExitCode.OK


@rules.command("explain")
@click.argument("entries", metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option(
    "--rls-config",
    "place",
    required=True,
    type=click.Path(path_type=Path),
    envvar="TIDEGATE_RLS_CONFIG",
    show_envvar=True,
    help="The rules file, or a directory of them.",
)
@click.option("--domain", required=True, help="The domain that the gateway sends.")
@json_option
def explain_command(entries: tuple[str, ...], place: Path, domain: str, as_json: bool) -> None:
    """Show which rule applies to a descriptor, and why.

    \b
    tidegate rules explain --rls-config rules.yaml --domain edge tenant=acme op=write
    """
    pairs: list[tuple[str, str]] = []
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{entry!r} is not an entry: write KEY=VALUE", param_hint="KEY=VALUE")
        pairs.append((key, value))
    found = explain(load_rules(place), domain, pairs)
    print_result(as_json, _document(found), _text(found))


def _document(found: Explanation) -> dict[str, object]:
    rule = found.rule
    return {
        "domain": found.domain,
        "steps": [
            {"entry": step.entry, "matches": step.matches, "reason": step.reason} for step in found.steps
        ],
        "rule": None
        if rule is None
        else {
            "path": rule.path,
            "name": rule.name or None,
            "unlimited": rule.limit is None,
            "requests_per_unit": None if rule.limit is None else rule.requests_per_unit,
            "unit": rule.unit or None,
            "shadow_mode": rule.is_shadow,
            "replaces": sorted(rule.replaces),
        },
        "counter": found.identifier or None,
        "reason": found.reason,
    }


def _text(found: Explanation) -> str:
    lines = [
        f"{step.entry}: `{step.matches}` {step.reason}"
        if step.matches is not None
        else f"{step.entry}: {step.reason}"
        for step in found.steps
    ]
    rule = found.rule
    if rule is None:
        return "\n".join([*lines, f"no rule: {found.reason}"])
    name = f" (name: {rule.name})" if rule.name else ""
    lines.append(f"rule: {rule.path}: {rule.describe()}{name}")
    if rule.limit is not None:
        lines.append(f"counter: {found.identifier}")
    if rule.replaces:
        lines.append(f"replaces: {', '.join(sorted(rule.replaces))}")
    return "\n".join(lines)
