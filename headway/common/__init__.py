"""What several packages of headway need: HTTP servers, Pareto fronts.

It may import no other package. Start with `http_server.py`.
"""
