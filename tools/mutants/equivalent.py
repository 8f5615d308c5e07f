"""Mutants that no test can kill, as they change nothing that anybody sees, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
