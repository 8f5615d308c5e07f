"""Cost profiles out of what a server logs: its steps, or the latencies of its requests.

It may import `simulator` and `calibration.measured`. Start with `from_steps.py`.
"""
