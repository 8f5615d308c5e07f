"""A scenario's engine on the wall clock, behind the HTTP interface of a vLLM server.

It may import what other views may. Start with `live_engine.py`; `server.py` has the addresses.
"""
