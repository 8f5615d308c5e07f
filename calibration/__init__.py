"""From measurements to cost profiles, and from profiles to their errors.

It may import `simulator` and `gpu_backend`. `kernel_tables/` composes profiles of published tables;
`engine_steps/` measures our own engine; `server_logs/` fits to a server's log; `measured/` compares
with published runs. Start with `commands.py`.
"""

from simulator.util.former_names import FormerNames

FormerNames(
    __name__,
    {
        "cross_check": "kernel_tables.external_validation",
        "efficiencies": "kernel_tables.fit_efficiencies",
        "engine_steps.rows": "engine_steps.steps_file",
        "fit_steps": "engine_steps.fit",
        "fit_tables": "kernel_tables.fit",
        "kernel_tables.cross_check": "kernel_tables.external_validation",
        "kernel_tables.efficiencies": "kernel_tables.fit_efficiencies",
        "measured.left_out": "measured.leave_one_source_out",
        "rows": "engine_steps.steps_file",
        "validate": "engine_steps.validate",
    },
)
