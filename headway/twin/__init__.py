"""A real server and its simulated twin: a scenario behind HTTP, load for a server, its shadow.

It may import `simulator`. Start with `live_engine.py` (a scenario on the wall clock) and
`server.py` (its addresses; `api/generate.py` answers them); `replay.py` sends load to a real
server, `shadow.py` watches one.
"""
