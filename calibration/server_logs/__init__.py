"""Cost profiles out of what a server logs: its steps, or the latencies of its requests.

It may import `simulator`, `calibration.measured`, `calibration.engine_steps` and the files of
`calibration` itself. Start with `from_steps.py`.
"""
