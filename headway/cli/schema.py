"""The verb `headway schema`."""

import json


def schema() -> int:
    """Print the scenario's JSON Schema, for completion and checks in an editor."""
    from headway.cli.json_schema import json_schema

    print(json.dumps(json_schema(), indent=1))
    return 0
